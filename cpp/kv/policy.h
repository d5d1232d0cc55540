// Which tokens a bounded KV cache keeps. Plain arithmetic: host and device code share this file.
#pragma once

#include <cstdint>
#include <limits>

#ifdef __CUDACC__
#define H2O_HD __host__ __device__
#else
#define H2O_HD
#endif

namespace h2o {

enum class Scoring : int32_t {
  sum,      // attention received (H2O)
  mean,     // attention received per token that could give it (RoCo, arXiv 2402.06262)
  inverse,  // the least attention received: keeps what H2O evicts, for the paper's ablation
  // the attention received from the last rows of each chunk, where a prompt has its question
  // (SnapKV, arXiv 2404.14469)
  question,
};

// What a score counts times, so that tokens whose values change little do not stay.
enum class ValueNorm : int32_t {
  none,
  l1,      // |v|_1 (VATP, arXiv 2406.12335)
  output,  // |W_O v|_2: how far the value can move the layer's output
};

// One rule for every policy: the first `sinks` positions stay, the newest `recent` positions stay,
// and of the rest the `heavy` ones with the largest accumulated attention stay (the heavy hitters
// of arXiv 2306.14048, section 4).
//
//   policy        sinks  heavy  recent
//   full            0      0    unbounded
//   window(r)       0      0    r
//   sinks(s, r)     s      0    r
//   h2o(h, r, s)    s      h    r
//
// With heavy = 0 exactly one token may go, the oldest one past the sinks: the rule is a ring, and
// no scores are kept.
//
// What "largest" means can be varied; the defaults are the paper's.
struct KvPolicy {
  static constexpr int32_t kUnbounded = std::numeric_limits<int32_t>::max();

  // Scoring::question: so many rows of a chunk count; and a score is the largest of those of so
  // many tokens on either side.
  static constexpr int32_t kQuestionRows = 32;
  static constexpr int32_t kNeighbours = 3;

  int32_t sinks = 0;
  int32_t heavy = 0;
  int32_t recent = kUnbounded;  // besides the token being decoded

  Scoring scoring = Scoring::sum;
  float decay = 1;  // what is left of a score after each token (A2SF, arXiv 2407.20485)
  ValueNorm value_norm = ValueNorm::none;

  bool operator==(const KvPolicy&) const = default;

  // How many tokens survive a step.
  H2O_HD int64_t budget() const { return int64_t{sinks} + heavy + recent; }

  // How many slots a sequence of up to `max_tokens` tokens needs: one more than the budget, which
  // does not count the token being decoded (h2o_semantics: a decode query sees H + R + 1 keys).
  H2O_HD int32_t slots(int32_t max_tokens) const {
    return budget() + 1 < max_tokens ? static_cast<int32_t>(budget() + 1) : max_tokens;
  }

  // With so many slots, are tokens evicted? If not, a text ends when they are full.
  H2O_HD bool evicts(int32_t slots) const { return slots > budget(); }

  // How many of `length` tokens are kept.
  H2O_HD int32_t kept(int32_t length) const {
    return budget() < length ? static_cast<int32_t>(budget()) : length;
  }

  // Does choosing what to evict need scores, and norms of values?
  H2O_HD bool keeps_scores() const { return heavy > 0; }
  H2O_HD bool weighs_values() const { return heavy > 0 && value_norm != ValueNorm::none; }
  H2O_HD bool weighs_outputs() const { return heavy > 0 && value_norm == ValueNorm::output; }

  // The first of the n rows of a chunk whose attention counts.
  H2O_HD int64_t first_scored(int64_t n) const {
    return scoring == Scoring::question && n > kQuestionRows ? n - kQuestionRows : 0;
  }

  // Do the tokens that may be evicted get the largest score of their neighbours before n of them
  // are? Where a chunk evicts; a token that is generated evicts one.
  H2O_HD bool pools_scores(int64_t n_evicted) const {
    return heavy > 0 && scoring == Scoring::question && n_evicted > 1;
  }

  // What a token at `position` is worth when the next one is at `next`: the lowest goes.
  H2O_HD float importance(float score, float norm, int32_t position, int32_t next) const {
    if (scoring == Scoring::mean) score /= static_cast<float>(next - position);
    if (scoring == Scoring::inverse) score = -score;
    return weighs_values() ? score * norm : score;
  }

  // Is the importance just the score?
  H2O_HD bool plain() const { return scoring == Scoring::sum && value_norm == ValueNorm::none; }

  // The oldest position of the recent window when the next token is at `next`.
  H2O_HD int32_t first_recent(int32_t next) const { return next > recent ? next - recent : 0; }

  // May the token at `position` make room for the one at position `next`?
  H2O_HD bool evictable(int32_t position, int32_t next) const {
    return position >= sinks && position < first_recent(next);
  }
};

// A token that may be evicted. The one of lowest importance goes first; of equals the younger, so
// that every back end picks the same one. A importance is never NaN: softmax sees to that, and
// attend() to finite norms.
struct Victim {
  float importance;
  int32_t position;
  int32_t slot;

  H2O_HD bool before(const Victim& other) const {
    return importance < other.importance ||
           (importance == other.importance && position > other.position);
  }
};

// Throws InvalidArgument, with the numbers, unless the policy keeps at least one token and decay is
// from 0 to 1.
void validate(const KvPolicy& policy);

}  // namespace h2o
