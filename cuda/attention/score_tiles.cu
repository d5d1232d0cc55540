#include "cuda/attention/half_rows.cuh"
#include "cuda/attention/prefill_mma.h"
#include "cuda/attention/prefill_step.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

// A block has a tile of keys and iterates over tiles of the queries that see at least one of them.
// A warp holds its own keys in registers as the left operand: sums over queries are sums along
// rows, independent of other warps.
template <int kDim_>
struct Shape {
  static constexpr int kDim = kDim_;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kStrips = 2;  // of 16 keys per warp
  static constexpr int kKeys = kWarps * kStrips * 16;
  static constexpr int kQueries = 64;
  static constexpr int kAtOnce = 32;  // queries whose logits are in registers at a time
  static constexpr int kStride = kTileStride<kDim>;
};

template <class S>
struct alignas(16) QueryTile {
  std::byte halves[S::kQueries * S::kStride];
  float lse[S::kQueries];
  float weight[S::kQueries];  // decay factor of a query's attention; 0: no such query
};

// A thread's part of 16 keys as left operand; keys past the end repeat the last one.
template <class S>
__device__ __forceinline__ void load_keys(const HalfRows<S::kDim>& rows, int32_t first,
                                          int32_t n_keys, uint32_t (&keys)[S::kDim / 16][4]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t i = min(first + half * 8 + lane / 4, n_keys - 1);
    const auto* row = reinterpret_cast<const uint32_t*>(rows.row(i)) + lane % 4;
#pragma unroll
    for (int j = 0; j < S::kDim / 16; ++j) {
      keys[j][half] = row[8 * j];
      keys[j][half + 2] = row[8 * j + 4];
    }
  }
}

template <class S>
__device__ __forceinline__ void load_queries(const PrefillStep& step, const SegmentKeys& keys,
                                             int32_t kv_head, int32_t first, QueryTile<S>& tile) {
  const int64_t before = step.first_query(kv_head);
  const HalfRows<S::kDim> rows(step.q_halves + before * S::kDim, 0);
  copy_rows_async<S::kQueries, S::kThreads>(shared_address(tile.halves), rows, first,
                                            step.n_queries());
  if (threadIdx.x >= S::kQueries) return;
  const int32_t t = first + static_cast<int32_t>(threadIdx.x);
  const bool exists = t < step.n_queries();
  copy_4_async(shared_address(&tile.lse[threadIdx.x]), step.lse + before + (exists ? t : 0),
               exists);
  tile.weight[threadIdx.x] = exists ? decay_since(step, keys.head.policy, t / step.group) : 0.0f;
}

// received += attention that the tile's queries give to this thread's keys, numbers lane / 4 + 8
// half of each strip. `later`: some of the block's keys come after some of the queries.
template <class S, bool later>
__device__ __forceinline__ void add_tile(const PrefillStep& step, int32_t kept, int32_t first_key,
                                         int32_t first_query, const QueryTile<S>& tile,
                                         const uint32_t (&keys)[S::kStrips][S::kDim / 16][4],
                                         float (&received)[S::kStrips][2]) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t row = shared_address(tile.halves) + lane_offset_columns_first<S::kDim>(lane);
#pragma unroll 1
  for (int query = 0; query < S::kQueries; query += S::kAtOnce) {
    float logits[S::kStrips][S::kAtOnce / 8][4] = {};
#pragma unroll
    for (int j = 0; j < S::kDim / 16; ++j) {
#pragma unroll
      for (int i = 0; i < S::kAtOnce; i += 16) {
        uint32_t q[4];
        load_matrices(q, row + (query + i) * S::kStride + j * 32);
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip) {
          multiply_add(logits[strip][i / 8], keys[strip][j], q[0], q[1]);
          multiply_add(logits[strip][i / 8 + 1], keys[strip][j], q[2], q[3]);
        }
      }
    }
    float scale = step.scale;
    if (step.changes.softcap > 0) {
#pragma unroll
      for (auto& strip : logits) {
#pragma unroll
        for (auto& logit : strip) {
#pragma unroll
          for (float& x : logit) x = step.changes.capped(x * scale);
        }
      }
      scale = 1;
    }
#pragma unroll
    for (int j = 0; j < S::kAtOnce / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = query + 8 * j + lane % 4 * 2 + i;
        const float lse = tile.lse[column];
        const float weight = tile.weight[column];
        const int32_t last = later ? kept + (first_query + column) / step.group : 0;
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float logit = logits[strip][j][2 * half + i];
            float p = exp2_negative(fmaf(logit, scale, -lse));
            if (later && first_key + strip * 16 + half * 8 + lane / 4 > last) p = 0.0f;
            received[strip][half] = fmaf(p, weight, received[strip][half]);
          }
        }
      }
    }
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kDim <= 128 ? 3 : 2)
    score_tiles_kernel(PrefillStep step) {
  let_next_start();
  wait_for_previous();
  std::byte* const shared = dynamic_shared<std::byte>();
  auto* const tiles = reinterpret_cast<QueryTile<S>*>(shared);  // double-buffered

  const Tiles block(step.cache);
  const int32_t kv_head = block.kv_head;
  const int32_t block_key = block.tile * S::kKeys;
  const SegmentKeys keys(step.cache, step.segment, kv_head);
  const int32_t n_keys = keys.kept + step.segment.n_rows;
  if (keys.head.scores == nullptr || block_key >= n_keys) return;
  if (keys.head.policy.scoring == Scoring::question) return;

  // The first query that sees one of the block's keys.
  int32_t first_query = max(0, block_key - keys.kept) * step.group;
  load_queries<S>(step, keys, kv_head, first_query, tiles[0]);
  commit_copies();

  const int32_t first_key = block_key + threadIdx.x / kWarp * S::kStrips * 16;
  uint32_t own[S::kStrips][S::kDim / 16][4];
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip) {
    load_keys<S>(key_rows<S::kDim>(step, keys, kv_head), first_key + strip * 16, n_keys,
                 own[strip]);
  }
  float received[S::kStrips][2] = {};

  for (int used = 0; first_query < step.n_queries(); used ^= 1, first_query += S::kQueries) {
    if (first_query + S::kQueries < step.n_queries()) {
      load_queries<S>(step, keys, kv_head, first_query + S::kQueries, tiles[used ^ 1]);
    }
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();  // tiles[used] has been loaded
    if (block_key + S::kKeys - 1 > keys.kept + first_query / step.group) {
      add_tile<S, true>(step, keys.kept, first_key, first_query, tiles[used], own, received);
    } else {
      add_tile<S, false>(step, keys.kept, first_key, first_query, tiles[used], own, received);
    }
    __syncthreads();  // no thread reads it any more
  }

  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = warp_sum<4>(received[strip][half]);
      const int32_t i = first_key + strip * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && i < n_keys) add_score(step, keys, i, sum);
    }
  }
}

template <int kDim>
void score(const Stream& stream, const PrefillStep& step) {
  using S = Shape<kDim>;
  launch(stream, score_tiles_kernel<S>, Tiles::grid(step.cache, step.max_keys(), S::kKeys),
         dim3(S::kThreads), 2 * sizeof(QueryTile<S>), step);
}

}  // namespace

void score_tiles(const Stream& stream, const PrefillStep& step) {
  with_head_dim(step.cache.head_dim, [&](auto dim) { score<dim>(stream, step); });
}

}  // namespace h2o::cuda
