#include "vulkan/attention/step.h"

#include <algorithm>
#include <cstddef>

#include "core/layout.h"
#include "kv/policy.h"
#include "vulkan/operations.h"

namespace h2o::vulkan {
namespace {

// The least keys of a split, and the most splits of a query, as in shaders/tiles.glsl.
constexpr int32_t kSplitKeys = 64, kMostSplits = 32;

// The shaders' kv.glsl and policy.glsl mirror these.
static_assert(sizeof(Segment) == 24 && offsetof(Segment, rolling) == 16);
static_assert(sizeof(KvPolicy) == 32 && offsetof(KvPolicy, value_norm) == 28);
static_assert(KvPolicy::kQuestionRows == 64 && KvPolicy::kNeighbors == 12);
static_assert(Scoring{0} == Scoring::sum && Scoring{1} == Scoring::mean &&
              Scoring{2} == Scoring::inverse && Scoring{4} == Scoring::question &&
              Scoring{5} == Scoring::random);
static_assert(ValueNorm{0} == ValueNorm::none && ValueNorm{2} == ValueNorm::output);

// So do weights.glsl and kv_types.glsl.
constexpr DType kTypes[] = {
    DType::f32,     DType::f16,    DType::q4_0,    DType::q4_1,  DType::q5_0,   DType::q5_1,
    DType::q8_0,    DType::q2_k,   DType::q3_k,    DType::q4_k,  DType::q5_k,   DType::q6_k,
    DType::iq2_xxs, DType::iq2_xs, DType::iq3_xxs, DType::iq1_s, DType::iq4_nl, DType::iq3_s,
    DType::iq2_s,   DType::iq4_xs, DType::iq1_m,   DType::bf16,  DType::tq1_0,  DType::tq2_0,
    DType::mxfp4,   DType::nvfp4,  DType::q1_0,    DType::q2_0};
constexpr uint32_t kNumbers[] = {0,  1,  2,  3,  6,  7,  8,  10, 11, 12, 13, 14, 16, 17,
                                 18, 19, 20, 21, 22, 23, 29, 30, 34, 35, 39, 40, 41, 42};
static_assert(std::ranges::equal(kTypes, kNumbers, {},
                                 [](DType type) { return static_cast<uint32_t>(type); }));

// Bytes of the arrays of shaders/admission.glsl for one kv_head.
int64_t admission_bytes(const KvView& cache) {
  const int64_t slots = (int64_t{cache.slots} + 1) / 2 * 2;
  const int64_t rows = (int64_t{cache.max_rows} + 1) / 2 * 2;
  return (slots + rows) * 8 + (2 * rows + slots) * 4;
}

}  // namespace

Splits::Splits(const KvView& cache)
    : n_(std::clamp((cache.slots + kSplitKeys - 1) / kSplitKeys, 1, kMostSplits)),
      n_partials_(int64_t{cache.n_heads} * std::max(cache.n_sequences * n_, kMostSplits)) {}

int32_t Splits::of_chunk(int32_t n_rows) { return std::max(kMostSplits / n_rows, 1); }

// Logits and logarithms of decoding sequences, or logarithms of a chunk's rows; partial sums; or
// the data of eviction, of several chunks in turn.
size_t workspace_bytes(const KvView& shape) {
  Step step{};
  KvView at_zero = shape;
  at_zero.workspace = nullptr;
  place_workspace(step, at_zero);
  return static_cast<size_t>(step.admission) +
         static_cast<size_t>(shape.n_kv_heads * admission_bytes(shape));
}

void place_workspace(Step& step, const KvView& cache) {
  const int64_t partials = Splits(cache).n_partials();
  const int64_t rows = std::max(cache.n_sequences, cache.max_rows);
  const bool scores = cache.scores != nullptr;
  Layout layout;
  const auto place = [&](int64_t n_floats) {
    return address_of(cache.workspace) +
           static_cast<uint64_t>(layout.place(n_floats * int64_t{sizeof(float)}));
  };
  step.partial_out = place(partials * cache.head_dim);
  step.partial_shift = place(partials);
  step.partial_total = place(partials);
  const uint64_t lse = place(scores ? rows * cache.n_heads : 0);
  const uint64_t logits =
      place(scores ? int64_t{cache.n_sequences} * cache.n_heads * cache.slots : 0);
  step.lse = scores ? lse : 0;
  step.logits = scores ? logits : 0;
  step.admission = place(0);
}

Step describe(const KvView& cache, const Rope& rope) {
  Step step{};
  step.k = address_of(cache.k);
  step.v = address_of(cache.v);
  step.positions = address_of(cache.positions);
  step.scores = address_of(cache.scores);
  step.value_norms = address_of(cache.value_norms);
  step.ranks = address_of(cache.ranks);
  step.next_slot = address_of(cache.next_slot);
  step.policies = address_of(cache.policies);
  step.output_gram = address_of(cache.output_gram);
  step.staged_k = address_of(cache.staged_k);
  step.staged_v = address_of(cache.staged_v);
  step.staged_scores = address_of(cache.staged_scores);
  step.staged_value_norms = address_of(cache.staged_value_norms);
  step.rope_table = address_of(cache.rope_table);
  step.k_row_bytes = cache.k_row_bytes;
  step.v_row_bytes = cache.v_row_bytes;
  step.n_heads = cache.n_heads;
  step.n_kv_heads = cache.n_kv_heads;
  step.head_dim = cache.head_dim;
  step.slots = cache.slots;
  step.max_rows = cache.max_rows;
  step.first_head = cache.first_head;
  step.frequencies = address_of(rope.frequencies);
  step.n_half = static_cast<int32_t>(rope.frequencies.cols);
  step.pairs = rope.layout == RopeLayout::pairs;
  step.magnitude = rope.magnitude;
  return step;
}

}  // namespace h2o::vulkan
