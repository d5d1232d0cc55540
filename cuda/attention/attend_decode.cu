// Decode attention, in two launches. The first splits the slots over blocks, each with its own
// softmax. The second merges them, adds the probabilities, which need the complete softmax, to the
// scores, and selects the victim. The first is in decode_splits.cuh, compiled once for each kind of
// row reader.
#include <cfloat>

#include "cuda/attention/attend.h"
#include "cuda/attention/decode_splits.h"
#include "cuda/attention/decode_team.cuh"
#include "cuda/attention/select_victim.cuh"
#include "cuda/matmul/round_group.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

// For few blocks, more threads hide latency; with fewer, more blocks fit.
constexpr int kMostThreads = 512, kFewThreads = 128;
constexpr int kManyBlocks = 264;  // two on each of 132 multiprocessors
constexpr int kMergeParts = 4;

// The softmax of a query head over all splits.
struct Softmax {
  float largest;
  float inverse;  // reciprocal of the sum of e^(logit - largest)
};

// Called by one warp. `recalled`: partial sums of `query` over the archive; n is 0 if there are
// none.
__device__ Softmax merge(const Partials& partials, const RecalledSums& recalled,
                         const LogitChanges& changes, int head, int64_t query, int n_splits) {
  const float* largest = partials.largest + query * partials.n_splits;
  const float* total = partials.total + query * partials.n_splits;
  const int lane = threadIdx.x % kWarp;
  float most = -INFINITY;
  for (int s = lane; s < n_splits; s += kWarp) most = fmaxf(most, largest[s]);
  const int64_t first = query * recalled.n;
  for (int r = lane; r < recalled.n; r += kWarp) most = fmaxf(most, recalled.largest[first + r]);
  most = warp_max(most);
  const bool sinks = changes.sinks != nullptr;
  const float sink = sinks ? changes.sink(head) : 0;
  if (sinks) most = fmaxf(most, sink);
  float sum = sinks && lane == 0 ? exp_negative(sink - most) : 0;
  for (int s = lane; s < n_splits; s += kWarp) {
    sum = fmaf(exp_negative(largest[s] - most), total[s], sum);
  }
  for (int r = lane; r < recalled.n; r += kWarp) {
    sum = fmaf(exp_negative(recalled.largest[first + r] - most), recalled.total[first + r], sum);
  }
  // Finite even if every logit is NaN.
  return {most, 1 / fmaxf(warp_sum(sum), FLT_MIN)};
}

// Calls put(i, element i of [n_heads, head_dim]) for query heads from `query` on, merged from the
// splits. Each of up to kMergeParts parts sums every n-th split, and their sums are added in order.
// The number of threads does not affect the result.
template <int kThreads, class Put>
__device__ void merge_outputs(const Partials& partials, const RecalledSums& recalled,
                              const Softmax* softmax, int64_t query, int n_heads, int head_dim,
                              int n_splits, const Put& put) {
  __shared__ float sums[kMostThreads];
  const int width = n_heads * head_dim;
  const int parts = max(1, min(kMergeParts, kMostThreads / width));
  const auto weighed = [&](int i, int part) {
    const int h = i / head_dim;
    const int64_t first = (query + h) * partials.n_splits;
    float sum = 0;
#pragma unroll 8
    for (int s = part; s < n_splits; s += parts) {
      const float weight = exp_negative(partials.largest[first + s] - softmax[h].largest);
      sum = fmaf(weight, partials.out[(first + s) * head_dim + i % head_dim], sum);
    }
    for (int r = part; r < recalled.n; r += parts) {
      const int64_t at = (query + h) * recalled.n + r;
      const float weight = exp_negative(recalled.largest[at] - softmax[h].largest);
      sum = fmaf(weight, recalled.out[at * head_dim + i % head_dim], sum);
    }
    return sum;
  };
  if (parts == 1) {
    for (int i = threadIdx.x; i < width; i += kThreads) {
      put(i, weighed(i, 0) * softmax[i / head_dim].inverse);
    }
    return;
  }
  for (int i = threadIdx.x; i < parts * width; i += kThreads) {
    sums[i] = weighed(i % width, i / width);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < width; i += kThreads) {
    float sum = 0;
    for (int p = 0; p < parts; ++p) sum += sums[p * width + i];
    put(i, sum * softmax[i / head_dim].inverse);
  }
}

// Blocks of each (segment, kv_head): the first updates the scores, the others merge the outputs of
// equal parts of the query heads.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == kFewThreads ? 5 : 1)
    finish_kernel(Decode decode, KvView cache, DeviceBatch batch, QuantizedRows rounded,
                  RecalledSums recalled) {
  float* const shared = dynamic_shared<float>();  // [group] Softmax, padded
  __shared__ Victim scratch[kThreads / kWarp];
  if (gridDim.x <= kFewSegments) let_next_start();
  // Written by copies only.
  const Segment segment = batch.segments[blockIdx.x];
  const int kv_head = blockIdx.y;
  const KvPolicy policy = cache.policies[segment.sequence];
  wait_for_previous();
  if (segment.n_rows != 1) return;

  const KvHead head = cache.head(policy, segment.sequence, kv_head);
  const int group = cache.n_heads / cache.n_kv_heads;
  const int used = head.policy.kept(segment.position) + 1;
  const Partials partials(cache, cache.workspace);
  const int32_t length = split_length(used, decode.n_pools);
  const int n_splits = (used + length - 1) / length;
  const bool merges = blockIdx.z > 0;
  const int n_heads = merges ? group / static_cast<int>(gridDim.z - 1) : group;
  const int first_head =
      kv_head * group + (merges ? static_cast<int>(blockIdx.z) - 1 : 0) * n_heads;
  const int64_t query = int64_t{segment.sequence} * cache.n_heads + first_head;
  if (recalled.n > 0 && !has_archived(cache, policy, segment.position, kv_head)) recalled.n = 0;

  auto* softmax = reinterpret_cast<Softmax*>(shared);
  for (int h = threadIdx.x / kWarp; h < n_heads; h += kThreads / kWarp) {
    const Softmax merged =
        merge(partials, recalled, decode.changes, first_head + h, query + h, n_splits);
    if (threadIdx.x % kWarp == 0) softmax[h] = merged;
  }
  let_next_start();
  __syncthreads();

  if (merges) {
    const int head_dim = cache.head_dim;
    const int n = cache.n_heads * head_dim;
    const int first = first_head * head_dim;
    float* const out = decode.out + int64_t{segment.row} * n + first;
    if (rounded && first == 0) {
      round_padding(rounded, segment.row, n / QuantizedRows::kGroup, threadIdx.x / kWarp,
                    kThreads / kWarp);
    }
    const auto put = [&](int i, float x) {
      out[i] = x;
      if (rounded) round_group(rounded, segment.row, (first + i) / QuantizedRows::kGroup, x);
    };
    merge_outputs<kThreads>(partials, recalled, softmax, query, n_heads, head_dim, n_splits, put);
    return;
  }

  const float* logits = partials.logits + query * partials.stride;
  const float decay = decode.reads ? 1.0f : policy.decay;
  const auto load = [&](const int32_t* slots, float* scores) {
    float received[kSlotsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      scores[i] = head.scores != nullptr ? head.scores[slots[i]] : 0;
    }
    if (head.scores == nullptr) return;
    for (int h = 0; h < group; ++h) {
      float logit[kSlotsAtOnce];
#pragma unroll
      for (int i = 0; i < kSlotsAtOnce; ++i) logit[i] = logits[h * partials.stride + slots[i]];
#pragma unroll
      for (int i = 0; i < kSlotsAtOnce; ++i) {
        const float p = exp_negative(logit[i] - softmax[h].largest);
        received[i] = fmaf(p, softmax[h].inverse, received[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      scores[i] = policy.with_received(scores[i] * decay, received[i]);
    }
  };
  const auto store = [&](int32_t slot, float score) {
    if (head.scores != nullptr) head.scores[slot] = score;
  };
  select_next_slot(head, segment, used, scratch, load, store, decode.evicts);
}

using DecodeSplits = decltype(&decode_splits<Single>);

// Kernels for this cache's types, in whole rows of segments that roll or do not; nullptr: none.
template <template <class...> class Rows>
DecodeSplits whole_rows(const KvView& cache) {
  if (cache.head_dim % 8 != 0 || cache.head_dim > 256) return nullptr;
  const auto are = [&](DType k, DType v) { return cache.k_dtype == k && cache.v_dtype == v; };
  if (are(DType::f32, DType::f32)) return decode_splits<Rows<F32Row>>;
  if (are(DType::f16, DType::f16)) return decode_splits<Rows<F16Row>>;
  if (are(DType::bf16, DType::bf16)) return decode_splits<Rows<BF16Row>>;
  if (are(DType::q8_0, DType::q8_0)) return decode_splits<Rows<Q8_0Row>>;
  if (are(DType::q8_0, DType::q4_0)) return decode_splits<Rows<Q8_0Row, Q4_0Row>>;
  if (are(DType::q4_0, DType::q4_0)) return decode_splits<Rows<Q4_0Row>>;
  return nullptr;
}

}  // namespace

size_t decode_workspace(const KvView& shape) { return Partials(shape, nullptr).bytes; }

void decode(const Stream& stream, const Attention& attention, const KvView& cache,
            const DeviceBatch& batch, DecodeKinds kinds, const QuantizedRows& rounded,
            const RecalledSums& recalled) {
  const int32_t n_segments = batch.n_segments;
  Decode decode{attention.q.floats(),
                attention.out.floats(),
                attention.scale,
                static_cast<int32_t>(attention.rope.frequencies.cols),
                attention.rope.layout == RopeLayout::pairs,
                false,
                false,
                LogitChanges(attention, 1),
                kinds.in_use,
                (batch.alone ? 1 : n_segments) * cache.n_kv_heads,
                !attention.k,
                attention.evicts};
  const DecodeSplits whole = whole_rows<Whole>(cache);
  const DecodeSplits rolled =
      turns_whole_octets(decode.half, decode.pairs) ? whole_rows<Rolled>(cache) : nullptr;
  decode.whole_fixed = whole != nullptr;
  decode.whole_rolling = rolled != nullptr;
  if (kinds.fixed && whole != nullptr) whole(stream, decode, cache, batch);
  if (kinds.rolling && rolled != nullptr) rolled(stream, decode, cache, batch);
  if ((kinds.fixed && whole == nullptr) || (kinds.rolling && rolled == nullptr)) {
    decode_splits<Single>(stream, decode, cache, batch);
  }
  // In whole 16-byte loads, into which ptxas merges reads of two heads.
  const size_t group = cache.n_heads / cache.n_kv_heads;
  const size_t shared = (group + 1) / 2 * 2 * sizeof(Softmax);
  // Whole groups of rounded elements are of one block.
  const unsigned parts = cache.head_dim % QuantizedRows::kGroup == 0 ? group : 1;
  const dim3 grid(n_segments, cache.n_kv_heads, 1 + parts);
  const auto finish = [&]<int kThreads>() {
    launch(stream, finish_kernel<kThreads>, grid, dim3(kThreads), shared, decode, cache, batch,
           rounded, recalled);
  };
  if (grid.x * grid.y * grid.z > kManyBlocks) {
    finish.template operator()<kFewThreads>();
  } else {
    finish.template operator()<kMostThreads>();
  }
}

}  // namespace h2o::cuda
