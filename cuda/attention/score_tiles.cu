#include <algorithm>

#include "cuda/attention/half_rows.cuh"
#include "cuda/attention/prefill.h"
#include "cuda/attention/prefill_step.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

// A block has a tile of keys and iterates over tiles of the queries that see at least one of them,
// or over a part of these: few blocks, as with few kv_heads, would take as long as the one with the
// most queries.
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

constexpr int32_t kScoringBlocks = 528;  // four on each of 132 multiprocessors
constexpr int32_t kMostParts = 8;
constexpr int kAddThreads = 256;

// Parts of the queries, each with a block per tile of keys.
struct Parts {
  // Parts for this many blocks each; `n_floats` is the size of the array `sums`.
  Parts(const PrefillStep& step, int64_t n_blocks, int32_t tile, float* sums, int64_t n_floats)
      : sums(sums), n_keys(step.max_keys()) {
    const int32_t n_tiles = (step.n_queries() + tile - 1) / tile;
    const int64_t of_part = int64_t{step.cache.n_kv_heads} * n_keys;
    const auto most = static_cast<int32_t>(std::min(
        {int64_t{kMostParts}, kScoringBlocks / n_blocks, n_floats / of_part, int64_t{n_tiles}}));
    const int32_t at_least_one = std::max(most, 1);
    queries = (n_tiles + at_least_one - 1) / at_least_one * tile;
    n = (step.n_queries() + queries - 1) / queries;
  }

  __device__ float& sum(const KvView& cache, int part, int32_t kv_head, int32_t key) const {
    return sums[(int64_t{part} * cache.n_kv_heads + kv_head) * n_keys + key];
  }

  float* sums;  // [n, n_kv_heads, n_keys], if n > 1
  int32_t n_keys;
  int32_t queries;  // per part: whole tiles
  int32_t n;
};

template <class S>
struct alignas(16) QueryTile {
  std::byte halves[S::kQueries * S::kStride];
  float lse[S::kQueries];
  float weight[S::kQueries];  // decay factor of a query's attention; 0: no such query
  float row[S::kQueries];     // of the segment
  float slope[S::kQueries];   // of logits that are not scaled yet
};

// A thread's keys, numbers lane / 4 + 8 half of each strip of its warp: parts of 16 as left
// operands; and their distances from the segment's first row, negative before it.
template <class S>
struct Keys {
  uint32_t halves[S::kStrips][S::kDim / 16][4];
  float place[S::kStrips][2];
};

// The keys from `first` on; keys past the end repeat the last one.
template <class S>
__device__ __forceinline__ void load_keys(const PrefillStep& step, const SegmentKeys& keys,
                                          int32_t kv_head, int32_t first, Keys<S>& own) {
  const int lane = threadIdx.x % kWarp;
  const auto rows = key_rows<S::kDim>(step, keys, kv_head);
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t i =
          min(first + strip * 16 + half * 8 + lane / 4, keys.kept + step.segment.n_rows - 1);
      own.place[strip][half] = static_cast<float>(-keys.distance(step.segment, 0, i));
      const auto* row = reinterpret_cast<const uint32_t*>(rows.row(i)) + lane % 4;
#pragma unroll
      for (int j = 0; j < S::kDim / 16; ++j) {
        own.halves[strip][j][half] = row[8 * j];
        own.halves[strip][j][half + 2] = row[8 * j + 4];
      }
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
  const int32_t row = t / step.group;
  tile.weight[threadIdx.x] = exists ? decay_since(step, keys.head.policy, row) : 0.0f;
  tile.row[threadIdx.x] = static_cast<float>(row);
  if (step.changes.slopes == nullptr) return;
  tile.slope[threadIdx.x] = step.changes.slope(step.head(kv_head, t)) / step.scale;
}

// Subtracts slopes, in the columns of `tile` from `query` on.
template <class S>
__device__ __forceinline__ void subtract_slopes(const QueryTile<S>& tile, int query,
                                                const Keys<S>& keys,
                                                float (&logits)[S::kStrips][S::kAtOnce / 8][4]) {
#pragma unroll
  for (int j = 0; j < S::kAtOnce / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = query + 8 * j + threadIdx.x % 4 * 2 + i;
      const float row = tile.row[column], slope = tile.slope[column];
#pragma unroll
      for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& logit = logits[strip][j][2 * half + i];
          logit = fmaf(-slope, row - keys.place[strip][half], logit);
        }
      }
    }
  }
}

// received += attention that the tile's queries give to this thread's keys. `distances`: logits
// depend on them, or some queries do not see some of the block's keys.
template <class S, bool distances>
__device__ __forceinline__ void add_tile(const PrefillStep& step, const QueryTile<S>& tile,
                                         const Keys<S>& keys, float (&received)[S::kStrips][2]) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t rows = shared_address(tile.halves) + lane_offset_columns_first<S::kDim>(lane);
  const float window = step.window > 0 ? static_cast<float>(step.window) : INFINITY;
#pragma unroll 1
  for (int query = 0; query < S::kQueries; query += S::kAtOnce) {
    float logits[S::kStrips][S::kAtOnce / 8][4] = {};
#pragma unroll
    for (int j = 0; j < S::kDim / 16; ++j) {
#pragma unroll
      for (int i = 0; i < S::kAtOnce; i += 16) {
        uint32_t q[4];
        load_matrices(q, rows + (query + i) * S::kStride + j * 32);
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip) {
          multiply_add(logits[strip][i / 8], keys.halves[strip][j], q[0], q[1]);
          multiply_add(logits[strip][i / 8 + 1], keys.halves[strip][j], q[2], q[3]);
        }
      }
    }
    if (distances && step.changes.slopes != nullptr) subtract_slopes(tile, query, keys, logits);
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
        const float row = distances ? tile.row[column] : 0.0f;
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float logit = logits[strip][j][2 * half + i];
            float p = exp2_negative(fmaf(logit, scale, -lse));
            const float distance = row - keys.place[strip][half];
            if (distances && !(distance >= 0 && distance < window)) p = 0.0f;
            received[strip][half] = fmaf(p, weight, received[strip][half]);
          }
        }
      }
    }
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kDim <= 128 ? 3 : 2)
    score_tiles_kernel(PrefillStep step, Parts parts) {
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

  // The first tile is that of the first query that sees one of the block's keys.
  const int part = static_cast<int>(blockIdx.y);
  const int32_t last_key = block_key + S::kKeys - 1;
  const int32_t end_of_seeing =
      keys.end_of_seeing(step.segment, step.window, last_key) * step.group;
  const int32_t end = min((part + 1) * parts.queries, end_of_seeing);
  const int32_t first_seeing = max(0, block_key - keys.kept) * step.group;
  int32_t first_query = max(first_seeing / S::kQueries * S::kQueries, part * parts.queries);
  if (first_query < end) load_queries<S>(step, keys, kv_head, first_query, tiles[0]);
  commit_copies();

  const int32_t first_key = block_key + threadIdx.x / kWarp * S::kStrips * 16;
  Keys<S> own;
  load_keys<S>(step, keys, kv_head, first_key, own);
  float received[S::kStrips][2] = {};

  for (int used = 0; first_query < end; used ^= 1, first_query += S::kQueries) {
    if (first_query + S::kQueries < end) {
      load_queries<S>(step, keys, kv_head, first_query + S::kQueries, tiles[used ^ 1]);
    }
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();  // tiles[used] has been loaded
    const int32_t first_row = first_query / step.group;
    const int32_t last_row = (first_query + S::kQueries - 1) / step.group;
    if (last_key > keys.kept + first_row || step.changes.slopes != nullptr ||
        block_key < keys.end_of_hidden(step.window, last_row)) {
      add_tile<S, true>(step, tiles[used], own, received);
    } else {
      add_tile<S, false>(step, tiles[used], own, received);
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
      if (lane % 4 > 0 || i >= n_keys) continue;
      if (parts.n > 1) {
        parts.sum(step.cache, part, kv_head, i) = sum;
      } else {
        add_score(step, keys, i, sum);
      }
    }
  }
}

// One thread per key: adds the sums of the parts in order.
__global__ void __launch_bounds__(kAddThreads) add_parts_kernel(PrefillStep step, Parts parts) {
  let_next_start();
  wait_for_previous();
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const SegmentKeys keys(step.cache, step.segment, kv_head);
  const auto key = static_cast<int32_t>(blockIdx.x * kAddThreads + threadIdx.x);
  if (keys.head.scores == nullptr || key >= keys.kept + step.segment.n_rows) return;
  if (keys.head.policy.scoring == Scoring::question) return;
  float sum = 0;
  for (int part = 0; part < parts.n; ++part) sum += parts.sum(step.cache, part, kv_head, key);
  add_score(step, keys, key, sum);
}

template <int kDim>
void score(const Stream& stream, const PrefillStep& step) {
  using S = Shape<kDim>;
  dim3 grid = Tiles::grid(step.cache, step.max_keys(), S::kKeys);
  // The memory of the splits of attention, which have been merged.
  const int64_t n_floats =
      KeySplits::most_partials(step.cache, kMostTileQueries) * step.cache.head_dim;
  const Parts parts(step, grid.x, S::kQueries, step.splits.out, n_floats);
  grid.y = static_cast<unsigned>(parts.n);
  launch(stream, score_tiles_kernel<S>, grid, dim3(S::kThreads), 2 * sizeof(QueryTile<S>), step,
         parts);
  if (parts.n == 1) return;
  const dim3 blocks((parts.n_keys + kAddThreads - 1) / kAddThreads, step.cache.n_kv_heads);
  launch(stream, add_parts_kernel, blocks, dim3(kAddThreads), 0, step, parts);
}

}  // namespace

void score_tiles(const Stream& stream, const PrefillStep& step) {
  with_tile_dim(step.cache.head_dim, [&](auto dim) { score<dim>(stream, step); });
}

}  // namespace h2o::cuda
