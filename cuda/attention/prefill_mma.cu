#include <cfloat>
#include <cmath>

#include "cuda/attention/half_rows.cuh"
#include "cuda/attention/prefill.h"
#include "cuda/attention/prefill_step.cuh"
#include "cuda/matmul/operands.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

// A block has a tile of queries in shared memory and iterates over tiles of keys, as in
// FlashAttention-2 (arXiv 2307.08691). A warp has its own queries, with accumulators in registers.
// kPlaces: logits depend on distances.
template <int kDim_, bool kPlaces_>
struct Shape {
  static constexpr int kDim = kDim_;
  static constexpr bool kPlaces = kPlaces_;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarp;
  // Strips of 16 queries per warp, as many as registers allow.
  static constexpr int kStrips = kDim <= (kPlaces ? 96 : 128) ? 2 : 1;
  static constexpr int kQueries = kWarps * kStrips * 16;
  static_assert(kQueries <= kMostTileQueries);
  static constexpr int kKeys = 64;
  static_assert(kSplitMultiple % kKeys == 0);
  static constexpr int kStride = kTileStride<kDim>;
  static constexpr int kSharedBytes = (kQueries + 2 * kKeys) * kStride;
  static_assert(kSharedBytes <= 99 << 10);  // of devices with the least
};

// A thread's part of its warp's queries. In strip s it holds queries lane / 4 + 8 * half, with
// columns 8 j + 2 (lane % 4) and the next: elements [s][j][2 * half] and the next.
template <class S>
struct Queries {
  float out[S::kStrips][S::kDim / 8][4] = {};
  float shift[S::kStrips][2];       // out and total are scaled by 2^-shift
  float total[S::kStrips][2] = {};  // sum of 2^logit over this thread's columns
};

template <class S>
using Logits = float[S::kStrips][S::kKeys / 8][4];

// Index in the block's tile of a thread's query in a strip and half.
template <class S>
__device__ inline int query_index(int strip, int half) {
  const int lane = threadIdx.x % kWarp;
  return (threadIdx.x / kWarp * S::kStrips + strip) * 16 + half * 8 + lane / 4;
}

// Rounds the queries from `first` on to f16 (zeros past the end), and saves them for score_tiles()
// if `saves`.
template <class S>
__device__ inline void load_queries(const PrefillStep& step, int32_t kv_head, int32_t first,
                                    bool saves, std::byte* tile) {
  constexpr int kPerRow = S::kDim / 4;
  for (int i = threadIdx.x; i < S::kQueries * kPerRow; i += S::kThreads) {
    const int query = i / kPerRow;
    const int c = i % kPerRow * 4;
    const int32_t t = first + query;
    uint2 halves{0, 0};
    if (t < step.n_queries() && c < step.cache.head_dim) {
      const auto q = *reinterpret_cast<const float4*>(step.q + step.offset(kv_head, t) + c);
      halves.x = pack_halves(within_half(q.x), within_half(q.y));
      halves.y = pack_halves(within_half(q.z), within_half(q.w));
    }
    if (saves && t < step.n_queries()) {
      uint16_t* kept = step.q_halves + (step.first_query(kv_head) + t) * S::kDim + c;
      *reinterpret_cast<uint2*>(kept) = halves;
    }
    *reinterpret_cast<uint2*>(tile + query * S::kStride + c * 2) = halves;
  }
}

// logits = queries keys^T
template <class S>
__device__ __forceinline__ void multiply_keys(uint32_t q_tile, uint32_t k_tile, Logits<S>& logits) {
  const int lane = threadIdx.x % kWarp;
  const int first_query = threadIdx.x / kWarp * S::kStrips * 16;
  const uint32_t q_row = q_tile + first_query * S::kStride + lane_offset_rows_first<S::kDim>(lane);
  const uint32_t k_row = k_tile + lane_offset_columns_first<S::kDim>(lane);
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
    for (auto& logit : logits[strip]) logit[0] = logit[1] = logit[2] = logit[3] = 0.0f;
  }
#pragma unroll
  for (int dim = 0; dim < S::kDim; dim += 16) {
    uint32_t q[S::kStrips][4];
#pragma unroll
    for (int strip = 0; strip < S::kStrips; ++strip) {
      load_matrices(q[strip], q_row + strip * 16 * S::kStride + dim * 2);
    }
#pragma unroll
    for (int key = 0; key < S::kKeys; key += 16) {
      uint32_t k[4];
      load_matrices(k, k_row + key * S::kStride + dim * 2);
#pragma unroll
      for (int strip = 0; strip < S::kStrips; ++strip) {
        multiply_add(logits[strip][key / 8], q[strip], k[0], k[1]);
        multiply_add(logits[strip][key / 8 + 1], q[strip], k[2], k[3]);
      }
    }
  }
}

// Stores the places of the keys from `first` on, of n, in the padding of their rows in `tile`.
template <class S>
__device__ __forceinline__ void copy_places_async(const PrefillStep& step, const SegmentKeys& keys,
                                                  int32_t first, int32_t n, std::byte* tile) {
  const int32_t i = first + static_cast<int32_t>(threadIdx.x);
  if (threadIdx.x >= S::kKeys || i >= n) return;
  std::byte* const place = tile + threadIdx.x * S::kStride + S::kDim * 2;
  if (i >= keys.kept) {
    *reinterpret_cast<int32_t*>(place) = keys.row_place(step.segment, i - keys.kept);
  } else {
    copy_4_async(shared_address(place), keys.cached_place(step.segment, i), true);
  }
}

// Calls f(logit, strip, half, distance) for this thread's logits, with distances in `rows` from the
// segment's first row, whose place is `origin`.
template <class S, class F>
__device__ __forceinline__ void for_each_distance(const float (&rows)[S::kStrips][2],
                                                  int32_t origin, const std::byte* k_tile,
                                                  Logits<S>& logits, const F& f) {
  const std::byte* const places = k_tile + threadIdx.x % 4 * 2 * S::kStride + S::kDim * 2;
#pragma unroll
  for (int j = 0; j < S::kKeys / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* place = reinterpret_cast<const int32_t*>(places + (8 * j + i) * S::kStride);
      const auto key = static_cast<float>(*place - origin);  // exact, or beyond every window
#pragma unroll
      for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          f(logits[strip][j][2 * half + i], strip, half, rows[strip][half] - key);
        }
      }
    }
  }
}

// Returns the scale still to be applied.
template <class S>
__device__ __forceinline__ float cap(const PrefillStep& step, Logits<S>& logits) {
  if (step.changes.softcap == 0) return step.scale;
#pragma unroll
  for (auto& strip : logits) {
#pragma unroll
    for (auto& logit : strip) {
#pragma unroll
      for (float& x : logit) x = step.changes.capped(x * step.scale);
    }
  }
  return 1;
}

// Slopes, soft-caps and windows, for the keys from `first_key` on. Returns the scale still to be
// applied.
template <class S>
__device__ __forceinline__ float change(const PrefillStep& step, const SegmentKeys& keys,
                                        int32_t kv_head, int32_t first_query, int32_t first_key,
                                        const std::byte* k_tile, Logits<S>& logits) {
  const bool slopes = step.changes.slopes != nullptr;
  // Is a key outside the window of the tile's last row, as any of the cached ones may be?
  const int32_t last_row = min(first_query + S::kQueries, step.n_queries()) / step.group;
  const bool hides = first_key < keys.end_of_hidden(step.window, last_row);
  if (!slopes && !hides) return cap<S>(step, logits);
  float rows[S::kStrips][2], slope[S::kStrips][2];
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t t = first_query + query_index<S>(strip, half);
      rows[strip][half] = static_cast<float>(t / step.group);
      slope[strip][half] = slopes ? step.changes.slope(step.head(kv_head, t)) / step.scale : 0.0f;
    }
  }
  const int32_t origin = keys.row_place(step.segment, 0);
  if (slopes) {
    for_each_distance<S>(rows, origin, k_tile, logits,
                         [&](float& logit, int strip, int half, float distance) {
                           logit = fmaf(-slope[strip][half], distance, logit);
                         });
  }
  const float scale = cap<S>(step, logits);
  if (hides) {
    const auto window = static_cast<float>(step.window);
    for_each_distance<S>(rows, origin, k_tile, logits, [&](float& logit, int, int, float distance) {
      if (distance >= window) logit = -INFINITY;
    });
  }
  return scale;
}

// Causal mask.
template <class S>
__device__ __forceinline__ void hide_later(const PrefillStep& step, int32_t kept,
                                           int32_t first_query, int32_t first_key,
                                           Logits<S>& logits) {
  const int first_column = threadIdx.x % 4 * 2;
  // Else what depends on it is computed before all tiles, and takes registers.
  asm volatile("" : "+r"(first_query));
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t t = first_query + query_index<S>(strip, half);
      const int32_t last = kept + t / step.group - first_key - first_column;
#pragma unroll
      for (int j = 0; j < S::kKeys / 8; ++j) {
        if (8 * j > last) logits[strip][j][2 * half] = -INFINITY;
        if (8 * j + 1 > last) logits[strip][j][2 * half + 1] = -INFINITY;
      }
    }
  }
}

// Converts logits to probabilities, up to a factor 2^-shift for a shift near the largest logit.
// While the largest logit grows by less than kSlack, which fits in f16's range, the shift is kept.
// It is finite even before a query has seen a key.
template <class S>
__device__ __forceinline__ void weigh(float scale, Logits<S>& logits, Queries<S>& own) {
  constexpr float kSlack = 8.0f;
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = -INFINITY;
#pragma unroll
      for (const auto& logit : logits[strip]) {
        largest = fmaxf(largest, fmaxf(logit[2 * half], logit[2 * half + 1]));
      }
      largest = warp_max<4>(largest) * scale;
      float& shift = own.shift[strip][half];
      if (__any_sync(kAllLanes, largest > shift + kSlack)) {
        largest = fmaxf(largest, shift);
        const float correction = exp2_fast(shift - largest);
        shift = largest;
        own.total[strip][half] *= correction;
#pragma unroll
        for (auto& out : own.out[strip]) {
          out[2 * half] *= correction;
          out[2 * half + 1] *= correction;
        }
      }
#pragma unroll
      for (auto& logit : logits[strip]) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          logit[i] = exp2_fast(fmaf(logit[i], scale, -shift));
          own.total[strip][half] += logit[i];
        }
      }
    }
  }
}

// out += probabilities values. The accumulators of one product are the operands of the next: two
// 8-column tiles have the same layout as one 16-column tile.
template <class S>
__device__ __forceinline__ void add_values(uint32_t v_tile, const Logits<S>& p, Queries<S>& own) {
  const uint32_t v_row = v_tile + lane_offset_rows_first<S::kDim>(threadIdx.x % kWarp);
#pragma unroll
  for (int key = 0; key < S::kKeys; key += 16) {
    uint32_t a[S::kStrips][4];
#pragma unroll
    for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& pair = p[strip][key / 8 + i / 2];
        a[strip][i] = pack_halves(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int dim = 0; dim < S::kDim; dim += 16) {
      uint32_t v[4];
      load_matrices_transposed(v, v_row + key * S::kStride + dim * 2);
#pragma unroll
      for (int strip = 0; strip < S::kStrips; ++strip) {
        multiply_add(own.out[strip][dim / 8], a[strip], v[0], v[1]);
        multiply_add(own.out[strip][dim / 8 + 1], a[strip], v[2], v[3]);
      }
    }
  }
}

// Writes this thread's part of a query's output, times `factor`, to `out` [head_dim].
template <class S>
__device__ __forceinline__ void write_row(const PrefillStep& step, float* out,
                                          const Queries<S>& own, int strip, int half,
                                          float factor) {
#pragma unroll
  for (int j = 0; j < S::kDim / 8; ++j) {
    const int column = 8 * j + threadIdx.x % 4 * 2;
    if (column >= step.cache.head_dim) return;
    const auto& sums = own.out[strip][j];
    const float2 pair{sums[2 * half] * factor, sums[2 * half + 1] * factor};
    *reinterpret_cast<float2*>(out + column) = pair;
    if (step.splits.n == 1) write_halves(step.operands, out + column - step.out, pair);
  }
}

// Writes the outputs, or the partial results of one split.
template <class S>
__device__ __forceinline__ void write_out(const PrefillStep& step, int32_t kv_head,
                                          int32_t first_query, const Queries<S>& own) {
  const bool is_first = threadIdx.x % 4 == 0;  // of the threads with a query
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = warp_sum<4>(own.total[strip][half]);
      float shift = own.shift[strip][half];
      const int32_t t = first_query + query_index<S>(strip, half);
      if (t >= step.n_queries()) continue;
      float* out = step.out + step.offset(kv_head, t);
      float factor = 1.0f;
      if (step.splits.n > 1) {
        const int64_t i = step.first_partial(kv_head, t) + blockIdx.y;
        if (is_first) {
          step.splits.shift[i] = shift;
          step.splits.total[i] = total;
        }
        out = step.splits.out + i * step.cache.head_dim;
      } else {
        if (step.changes.sinks != nullptr) {
          const float sink = step.changes.sink(step.head(kv_head, t));
          const float largest = fmaxf(shift, sink);
          factor = exp2_fast(shift - largest);  // rescales the previous sums
          total = total * factor + exp2_fast(sink - largest);
          shift = largest;
        }
        factor /= total;
        if (step.lse != nullptr && is_first) {
          step.lse[step.first_query(kv_head) + t] = shift + log2f(total);
        }
      }
      write_row<S>(step, out, own, strip, half, factor);
    }
  }
}

// Each block along y has a part of the keys.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 2) prefill_mma_kernel(PrefillStep step) {
  let_next_start();
  wait_for_previous();
  std::byte* const shared = dynamic_shared<std::byte>();
  const uint32_t q_tile = shared_address(shared);
  const uint32_t k_tile = q_tile + S::kQueries * S::kStride;
  const uint32_t v_tile = k_tile + S::kKeys * S::kStride;

  // Queries with the most keys start first.
  const Tiles block(step.cache);
  const int32_t kv_head = block.kv_head;
  const int32_t first_query = (block.last - block.tile) * S::kQueries;
  const SegmentKeys keys(step.cache, step.segment, kv_head);
  const int32_t last_query = min(first_query + S::kQueries, step.n_queries()) - 1;
  const int32_t n_keys = keys.kept + last_query / step.group + 1;
  const int32_t n_seen_by_all = keys.kept + first_query / step.group + 1;
  const int32_t split = static_cast<int32_t>(blockIdx.y) * step.splits.length;
  const int32_t begin = S::kPlaces ? max(split, first_tile(step, keys, first_query)) : split;
  const int32_t end = min(split + step.splits.length, n_keys);
  if (begin >= end) return;
  const auto k = key_rows<S::kDim>(step, keys, kv_head);
  std::byte* const k_rows = shared + S::kQueries * S::kStride;
  // Where the values are, in the padding of their tile, because registers are few.
  auto* const v_rows =
      reinterpret_cast<const uint16_t**>(k_rows + S::kKeys * S::kStride + S::kDim * 2);
  if (threadIdx.x == 0) {
    const auto v = value_rows<S::kDim>(step, keys, kv_head);
    v_rows[0] = v.old;
    v_rows[1] = v.own;
  }
  const auto copy_keys = [&](int32_t first_key) {
    copy_rows_async<S::kKeys, S::kThreads>(k_tile, k, first_key, end);
    if (S::kPlaces) copy_places_async<S>(step, keys, first_key, end, k_rows);
    commit_copies();
  };
  copy_keys(begin);
  // One of the splits of these queries has the last key.
  load_queries<S>(step, kv_head, first_query, step.q_halves != nullptr && end == n_keys, shared);
  Queries<S> own;
#pragma unroll
  for (auto& shift : own.shift) shift[0] = shift[1] = -FLT_MAX;

  for (int32_t first_key = begin; first_key < end; first_key += S::kKeys) {
    wait_for_copies<0>();
    __syncthreads();  // keys have been loaded, and no thread reads the previous values
    auto v = k;
    v.old = v_rows[0];
    v.own = v_rows[1];
    copy_rows_async<S::kKeys, S::kThreads>(v_tile, v, first_key, end);
    commit_copies();
    Logits<S> logits;
    multiply_keys<S>(q_tile, k_tile, logits);
    const float scale = S::kPlaces
                            ? change<S>(step, keys, kv_head, first_query, first_key, k_rows, logits)
                            : cap<S>(step, logits);
    wait_for_copies<0>();
    __syncthreads();  // values have been loaded, and no thread reads the previous keys
    if (first_key + S::kKeys < end) copy_keys(first_key + S::kKeys);
    if (first_key + S::kKeys > n_seen_by_all) {
      hide_later<S>(step, keys.kept, first_query, first_key, logits);
    }
    weigh<S>(scale, logits, own);
    add_values<S>(v_tile, logits, own);
  }
  write_out<S>(step, kv_head, first_query, own);
}

template <class S>
void attend(const Stream& stream, PrefillStep step) {
  const dim3 grid = split_keys(step, S::kQueries);
  launch(stream, prefill_mma_kernel<S>, grid, dim3(S::kThreads), S::kSharedBytes, step);
  if (step.splits.n > 1) merge_splits(stream, step);
}

}  // namespace

int tile_dim(int head_dim) {
  int found = 0;
  with_tile_dim(head_dim, [&](auto dim) { found = dim; });
  return found;
}

void prefill_mma(const Stream& stream, const PrefillStep& step) {
  const bool places = step.window > 0 || step.changes.slopes != nullptr;
  with_tile_dim(step.cache.head_dim, [&](auto dim) {
    places ? attend<Shape<dim, true>>(stream, step) : attend<Shape<dim, false>>(stream, step);
  });
}

}  // namespace h2o::cuda
