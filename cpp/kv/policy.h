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
struct KvPolicy {
  static constexpr int32_t kUnbounded = std::numeric_limits<int32_t>::max();

  int32_t sinks = 0;
  int32_t heavy = 0;
  int32_t recent = kUnbounded;  // besides the token being decoded

  // How many tokens survive a step.
  H2O_HD int64_t budget() const { return int64_t{sinks} + heavy + recent; }

  // Does choosing what to evict need scores?
  H2O_HD bool keeps_scores() const { return heavy > 0; }

  // May the token at `position` make room for the one at position `next`?
  H2O_HD bool evictable(int32_t position, int32_t next) const {
    return position >= sinks && position < int64_t{next} - recent;
  }
};

// A token that may be evicted. The lowest score goes first; of equal scores the younger goes, so
// that every back end picks the same one. Scores are never NaN: softmax sees to that.
struct Victim {
  float score;
  int32_t position;
  int32_t slot;

  H2O_HD bool before(const Victim& other) const {
    return score < other.score || (score == other.score && position > other.position);
  }
};

// Throws InvalidArgument, with the numbers, unless the policy keeps at least one token.
void validate(const KvPolicy& policy);

}  // namespace h2o
