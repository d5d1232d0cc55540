// Which tokens a bounded KV cache keeps. Shared by host and device code.
#pragma once

#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace h2o {

enum class Scoring : int32_t {
  sum,      // attention received (H2O)
  mean,     // attention received, per token that could attend to it (RoCo, arXiv 2402.06262)
  inverse,  // keeps the tokens with the least attention, for the paper's ablation
  // the largest attention from one of the last rows of each chunk, where a prompt has its question
  // (after SnapKV, arXiv 2404.14469, which sums)
  question = 4,  // 3 was a sum, in older snapshots
  // no attention, but a random number, drawn again at each eviction (after arXiv 2609.03430): the
  // baseline of the other scores
  random,
};

// A factor for the score, so that tokens whose values contribute little are evicted first.
enum class ValueNorm : int32_t {
  none,
  l1,      // |v|_1 (VATP, arXiv 2406.12335)
  output,  // |W_O v|_2: bounds the value's contribution to the layer's output
};

// One rule for every policy: the first `sinks` positions and the newest `recent` positions are
// kept, and of the rest the `heavy` tokens with the largest accumulated attention (the heavy
// hitters of arXiv 2306.14048, section 4). The end of a prompt can be kept too (`tail_begin`,
// `tail_end`): a budget that loses its prompt loses the task (arXiv 2605.18053).
//
//   policy        sinks  heavy  recent
//   full            0      0    unbounded
//   window(r)       0      0    r
//   sinks(s, r)     s      0    r
//   h2o(h, r, s)    s      h    r
//
// With heavy = 0 exactly one token is evictable, the oldest one past the sinks: the cache is a ring
// buffer and no scores are kept.
//
// The other members vary the score; the defaults are the paper's.
struct KvPolicy {
  static constexpr int32_t kUnbounded = std::numeric_limits<int32_t>::max();

  // Scoring::question: the number of rows of a chunk that count, and the radius of the max-pooling
  // over neighboring tokens.
  static constexpr int32_t kQuestionRows = 64;
  static constexpr int32_t kNeighbors = 12;

  int32_t sinks = 0;
  int32_t heavy = 0;
  int32_t recent = kUnbounded;  // besides the token being decoded

  // These positions are kept, and count as recent wherever they are: once they are older than the
  // newest `recent` tokens, these are fewer by their number.
  int32_t tail_begin = 0;
  int32_t tail_end = 0;

  Scoring scoring = Scoring::sum;
  // factor applied to scores after each token that counts (A2SF, arXiv 2407.20485)
  float decay = 1;
  ValueNorm value_norm = ValueNorm::none;

  bool operator==(const KvPolicy&) const = default;

  // Tokens kept after a step.
  H2O_HD int64_t budget() const { return int64_t{sinks} + heavy + recent; }

  // Slots for a sequence of up to `max_tokens` tokens. One more than the budget, which does not
  // count the token being decoded: a decode query attends to H + R + 1 keys.
  H2O_HD int32_t slots(int32_t max_tokens) const {
    return budget() + 1 < max_tokens ? static_cast<int32_t>(budget() + 1) : max_tokens;
  }

  // Does a pool of this many slots evict? If not, the sequence ends when it is full.
  H2O_HD bool evicts(int32_t slots) const { return slots > budget(); }

  // Tokens kept out of `length`.
  H2O_HD int32_t kept(int32_t length) const {
    return budget() < length ? static_cast<int32_t>(budget()) : length;
  }

  // Does eviction use scores, and norms of values?
  H2O_HD bool keeps_scores() const { return heavy > 0 && scoring != Scoring::random; }
  H2O_HD bool weighs_values() const { return keeps_scores() && value_norm != ValueNorm::none; }
  H2O_HD bool weighs_outputs() const { return keeps_scores() && value_norm == ValueNorm::output; }

  // The first of a chunk's n rows whose attention counts.
  H2O_HD int64_t first_scored(int64_t n) const {
    return scoring == Scoring::question && n > kQuestionRows ? n - kQuestionRows : 0;
  }

  // A score after the attention from one more row, or from several.
  H2O_HD float with_received(float score, float received) const {
    if (scoring != Scoring::question) return score + received;
    return score < received ? received : score;
  }

  // Are scores max-pooled over neighboring tokens before evicting n tokens? Only when a chunk
  // evicts; a decoded token evicts one.
  H2O_HD bool pools_scores(int64_t n_evicted) const {
    return heavy > 0 && scoring == Scoring::question && n_evicted > 1;
  }

  // The importance of the token at `position` in the model's kv_head number `head`, when the next
  // token is at `next`; the lowest is evicted.
  H2O_HD float importance(float score, float norm, int32_t position, int32_t next,
                          int32_t head) const {
    if (scoring == Scoring::random) return random_number(position, next, head);
    if (scoring == Scoring::mean) score /= static_cast<float>(next - position);
    if (scoring == Scoring::inverse) score = -score;
    return weighs_values() ? score * norm : score;
  }

  // 24 bits by a hash (lowbias32 of C. Wellons), so that every device has the same.
  H2O_HD static float random_number(int32_t position, int32_t next, int32_t head) {
    uint32_t bits = static_cast<uint32_t>(position) * 0x9e3779b1u +
                    static_cast<uint32_t>(next) * 0x85ebca77u +
                    static_cast<uint32_t>(head) * 0xc2b2ae3du;
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    return static_cast<float>((bits ^ bits >> 16) >> 8);
  }

  // Is the importance just the score?
  H2O_HD bool plain() const { return scoring == Scoring::sum && value_norm == ValueNorm::none; }

  // The oldest position of the recent window when the next token is at `next`.
  H2O_HD int32_t first_recent(int32_t next) const {
    if (next <= recent) return 0;
    const int32_t first = next - recent, tail = tail_end - tail_begin;
    return first + tail >= tail_end ? first + tail : first;
  }

  // Is the position part of the tail?
  H2O_HD bool in_tail(int32_t position) const {
    return position >= tail_begin && position < tail_end;
  }

  // May the token at `position` be evicted for the token at position `next`?
  H2O_HD bool evictable(int32_t position, int32_t next) const {
    return position >= sinks && position < first_recent(next) && !in_tail(position);
  }
};

// An evictable token. The lowest importance is evicted first; ties: the younger token, so that all
// back ends agree. The importance is never NaN: attention is finite and attend() makes norms
// finite.
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
// between 0 and 1.
void validate(const KvPolicy& policy);

}  // namespace h2o
