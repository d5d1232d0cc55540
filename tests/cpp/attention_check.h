// Compares the test device's attention with the reference, batch by batch from the same state.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "attention_reference.h"

namespace h2o {

// The columns of [n, heads * head_dim] of `count` heads from `head`.
inline std::vector<float> heads_of(const std::vector<float>& x, int64_t n, int64_t heads,
                                   int64_t head, int64_t count, int64_t head_dim) {
  std::vector<float> part;
  for (int64_t i = 0; i < n; ++i) {
    const auto from = x.begin() + (i * heads + head) * head_dim;
    part.insert(part.end(), from, from + count * head_dim);
  }
  return part;
}

struct Totals {
  int64_t n_outputs = 0;
  int64_t n_evictions = 0;
  int64_t n_close_calls = 0;  // where rounding decided the eviction
};

// One for each kv_head of each sequence.
inline std::vector<ReferenceHead> reference_heads(const KvPolicy& policy, const KvShape& shape,
                                                  const LogitRules& rules) {
  const int32_t group = shape.n_heads / shape.n_kv_heads;
  std::vector<ReferenceHead> heads;
  for (int32_t i = 0; i < shape.n_sequences * shape.n_kv_heads; ++i) {
    const int32_t first = i % shape.n_kv_heads * group;
    heads.emplace_back(policy, shape, rules.of_heads(first, first + group), i % shape.n_kv_heads);
  }
  return heads;
}

// Attends to random rows, and compares the outputs of each piece and kv_head with those of
// step(head, number of rows, q, k, v). Then calls after(piece, kv_head, head).
template <class Step, class After>
void check_batch(Random& random, Rig& rig, const KvShape& shape, std::vector<ReferenceHead>& heads,
                 const std::vector<Piece>& pieces, const Step& step, const After& after) {
  const int32_t group = shape.n_heads / shape.n_kv_heads;
  int64_t n = 0;
  for (const Piece& piece : pieces) n += piece.n_rows;
  const Qkv in = random_qkv(random, shape, n);
  const std::vector<float> out = rig.attend(pieces, in);
  int64_t row = 0;
  for (const Piece& piece : pieces) {
    const int64_t n_rows = piece.n_rows;
    const Qkv mine = in.rows(shape, row, n_rows);
    const Qkv output = Qkv{out, in.k, in.v}.rows(shape, row, n_rows);
    row += n_rows;
    for (int32_t kv_head = 0; kv_head < shape.n_kv_heads; ++kv_head) {
      ReferenceHead& head = heads[piece.sequence * shape.n_kv_heads + kv_head];
      const auto part = [&](const std::vector<float>& x, int64_t all, int64_t count) {
        return heads_of(x, n_rows, all, kv_head * count, count, shape.head_dim);
      };
      const ReferenceHead::Output expected =
          step(head, n_rows, part(mine.q, shape.n_heads, group), part(mine.k, shape.n_kv_heads, 1),
               part(mine.v, shape.n_kv_heads, 1));
      const std::vector<float> actual = part(output.q, shape.n_heads, group);
      REQUIRE(actual.size() == expected.value.size());
      double worst = 0;
      for (size_t i = 0; i < actual.size(); ++i) {
        worst = std::max(worst, in_bounds(actual[i], expected.value[i], expected.bound[i]));
      }
      CHECK(worst <= 1);
      after(piece, kv_head, head);
    }
  }
}

// `n_steps` batches of random rows; next_pieces(random, cache) returns their sequences.
template <class NextPieces>
void check_against_reference(Random& random, const KvPolicy& policy, const KvShape& shape,
                             int n_steps, const NextPieces& next_pieces, Totals& totals,
                             const LogitRules& rules = {}) {
  CAPTURE(policy.sinks);
  CAPTURE(policy.heavy);
  CAPTURE(policy.recent);
  CAPTURE(shape.n_heads);
  CAPTURE(shape.n_kv_heads);
  CAPTURE(shape.head_dim);
  CAPTURE(shape.max_tokens);
  CAPTURE(info(shape.k_dtype).name);
  Rig rig(policy, shape);
  rig.set_logits(rules);
  std::vector<ReferenceHead> heads = reference_heads(policy, shape, rules);
  std::vector<int32_t> lengths(shape.n_sequences);

  for (int step = 0; step < n_steps; ++step) {
    CAPTURE(step);
    const std::vector<Piece> pieces = next_pieces(random, rig.cache());
    if (pieces.empty()) continue;
    int64_t n = 0;
    for (const Piece& piece : pieces) n += piece.n_rows;
    const auto reference = [&](ReferenceHead& head, int64_t n_rows, const auto&... qkv) {
      return head.step(n_rows, qkv..., n > std::ssize(pieces));
    };
    const auto compare_cache = [&](const Piece& piece, int32_t kv_head, ReferenceHead& head) {
      const auto sequence = piece.sequence;
      if (kv_head == 0) lengths[sequence] += piece.n_rows;
      totals.n_outputs += piece.n_rows * shape.n_heads / shape.n_kv_heads * shape.head_dim;
      const std::vector<KvEntry> entries = rig.entries(sequence, kv_head);
      const int64_t n_before = std::ssize(head.kept());
      REQUIRE(head.adopt(entries));
      totals.n_evictions += n_before - std::ssize(head.kept());
      CHECK(std::ssize(entries) == rig.cache().kept(sequence));
      double worst_score = 0;
      for (size_t i = 0; i < entries.size(); ++i) {
        const Kept& kept = head.kept()[i];
        const bool scored = policy.keeps_scores();
        worst_score = std::max(worst_score, in_bounds(entries[i].score, scored ? kept.score : 0,
                                                      scored ? kept.score_error() : 0));
      }
      CHECK(worst_score <= 1);
      CHECK(rig.cache().length(sequence) == lengths[sequence]);
    };
    check_batch(random, rig, shape, heads, pieces, reference, compare_cache);
  }
  for (const ReferenceHead& head : heads) totals.n_close_calls += head.n_close_calls();
}

}  // namespace h2o
