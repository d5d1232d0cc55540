// BucketedDraw: draws from many candidates without sorting them, with buckets by distance to the
// largest logit. Only candidates that share a bucket with a limit or with the drawn token are
// compared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "text/candidates.h"
#include "text/logit_row.h"
#include "text/token_weights.h"

namespace h2o {

// Which of the sorted candidates are kept; see SamplerOptions.
struct DrawCuts {
  int32_t top_k;  // 0: all
  float top_p;
  float min_p;
};

class BucketedDraw {
 public:
  struct Amount {  // of candidates
    double mass = 0;
    int32_t count = 0;
  };

  // Memory for a row. The draws of a thread share it, so that it stays in the processor's cache.
  struct Scratch {
    void resize(const LogitRow& row);

    std::vector<int16_t> bucket_of;     // by token
    std::vector<Amount> buckets;        // most likely candidates first
    std::vector<Candidate> candidates;  // all, and room for a block
  };

  // The row needs its peaks, and the scratch the size of the row. Both must outlive it.
  BucketedDraw(const LogitRow& row, float temperature, const DrawCuts& cuts, Scratch& scratch);

  // The candidate at cumulative probability `u`, 0 <= u < 1, in descending order of likelihood.
  int32_t draw(double u);

 private:
  // The least likely candidate kept: the last one in sorted order.
  struct Limit {
    float logit;
    int32_t token;
  };

  bool has_masses() const;
  void fill_buckets();
  int32_t bucket_below(float distance) const;
  int32_t min_p_bucket(float margin) const;
  Limit find_limit(int32_t& last_bucket);
  float weight_if_kept(size_t token, const Limit& limit, float min_weight) const;
  template <typename Wanted, typename Visit>
  void for_tokens(Wanted wanted, Visit visit) const;
  void weigh(int32_t last_bucket, const Limit& limit);
  size_t gather_bucket(int32_t bucket, const Limit& limit, float min_weight);
  template <typename Reached>
  Limit narrow(size_t n, Amount& before, Reached reached);

  const LogitRow& row_;
  const std::span<const float> logits_;
  const TokenWeights weight_of_;
  const DrawCuts cuts_;
  const size_t k_;  // of top-k
  const std::span<int16_t> bucket_of_;
  const std::span<Amount> buckets_;
  const std::span<Candidate> candidates_;
  float scale_ = 0;  // buckets per unit of distance
};

}  // namespace h2o
