// Who stays when the rows of a long segment have attended: choose and admit, one block for each
// kv_head.
#include "cuda/attention/attend.h"
#include "cuda/attention/segment_keys.cuh"
#include "cuda/attention/select_victim.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kBins = 256;

// The workspace of one kv_head. "All" are the slots and, after them, the rows of the segment.
struct Admission {
  __device__ Admission(const KvView& cache, int kv_head)
      : n(cache.slots + cache.max_rows), orders(nullptr) {
    std::byte* base = cache.workspace + kv_head * bytes(cache);
    orders = reinterpret_cast<uint64_t*>(base);
    to = reinterpret_cast<int32_t*>(orders + n);
    free = to + cache.max_rows;
    closed = free + cache.slots;
  }

  static __host__ __device__ size_t bytes(const KvView& cache) {
    const size_t slots = (cache.slots + 1) / 2 * 2, rows = (cache.max_rows + 1) / 2 * 2;
    return (slots + rows) * sizeof(uint64_t) + (rows + 2 * slots) * sizeof(int32_t);
  }

  int32_t n;
  uint64_t* orders;  // [all] in which they are evicted; kStays for those that may not be
  int32_t* to;       // [rows] the slot of a row that stays, or -1
  int32_t* free;     // [slots] of evicted tokens, in order
  int32_t* closed;   // [slots] by rank: how many tokens of lower rank are evicted
};

constexpr uint64_t kStays = ~uint64_t{0};

// Of two victims the one that goes first has the smaller order, and no two have the same.
__device__ uint64_t order_of(const Victim& victim) {
  const auto bits = __float_as_uint(victim.importance + 0.0f);  // -0 is 0
  const uint32_t sortable = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{sortable} << 32 | (0xffffffffu - static_cast<uint32_t>(victim.position));
}

// The sum of x over the threads before this one; `total`, over all. `scratch`: shared, [n_warps].
__device__ int32_t block_scan(int32_t x, int32_t* scratch, int32_t& total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int32_t sum = x;
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    const int32_t before = __shfl_up_sync(kAllLanes, sum, apart);
    if (lane >= apart) sum += before;
  }
  if (lane == kWarp - 1) scratch[warp] = sum;
  __syncthreads();
  int32_t before = 0;
  total = 0;
  for (int w = 0; w < kThreads / kWarp; ++w) {
    if (w < warp) before += scratch[w];
    total += scratch[w];
  }
  __syncthreads();
  return before + sum - x;
}

// For i in [0, n), in order: found(i, how many before it are) for those with is(i). How many are.
template <class Is, class Found>
__device__ int32_t number(int32_t n, int32_t* scratch, const Is& is, const Found& found) {
  int32_t before = 0;
  for (int32_t begin = 0; begin < n; begin += kThreads) {
    const int32_t i = begin + threadIdx.x;
    const bool counts = i < n && is(i);
    int32_t total;
    const int32_t index = before + block_scan(counts, scratch, total);
    if (i < n) found(i, index, counts);
    before += total;
  }
  return before;
}

// The k-th smallest (k from 1) of orders [n], which differ but for kStays: eight bits at a time.
__device__ uint64_t select(const uint64_t* orders, int32_t n, int32_t k, int32_t* bins) {
  __shared__ uint64_t chosen;
  __shared__ int32_t left;
  uint64_t prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    for (int32_t begin = 0; begin < n; begin += kThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      const uint64_t order = i < n ? orders[i] : 0;
      const bool counts = i < n && (shift == 56 || order >> (shift + 8) == prefix >> (shift + 8));
      // Many scores begin with the same bits: one addition for all lanes of a bin.
      const int32_t bin = counts ? static_cast<int32_t>(order >> shift & 255) : -1;
      const unsigned peers = __match_any_sync(kAllLanes, bin);
      const int leader = __ffs(static_cast<int>(peers)) - 1;
      if (counts && static_cast<int>(threadIdx.x) % kWarp == leader)
        atomicAdd(bins + bin, __popc(peers));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = 0;
      for (; k > bins[bin]; ++bin) k -= bins[bin];
      chosen = prefix | static_cast<uint64_t>(bin) << shift;
      left = k;
    }
    __syncthreads();
    prefix = chosen;
    k = left;
  }
  return prefix;
}

// As admit_chunk() of the CPU: keeps `budget` tokens, and finds a free slot for each row that
// stays.
__device__ void admit_rows(const KvView& cache, const Segment& segment, const SegmentKeys& keys) {
  __shared__ int32_t bins[kBins];
  __shared__ int32_t scratch[kThreads / kWarp];
  const KvHead& head = keys.head;
  const KvPolicy& policy = head.policy;
  const Admission work(cache, blockIdx.x);
  const int32_t next = segment.position + segment.n_rows;
  const int32_t written = head.written(segment.position);
  const int32_t dead = head.dead_slot(segment.position);
  const int32_t n = head.slots + segment.n_rows;

  for (int32_t i = threadIdx.x; i < n; i += kThreads) {
    const bool is_row = i >= head.slots;
    const int32_t row = i - head.slots;
    work.orders[i] = kStays;
    if (!is_row && (i >= written || i == dead)) continue;
    const int32_t position = is_row ? segment.position + row : head.positions[i];
    if (!policy.evictable(position, next)) continue;
    const float* scores = is_row ? keys.chunk.scores + row : head.scores + i;
    const float* norms = is_row ? keys.chunk.value_norms + row : head.value_norms + i;
    const float score = head.scores != nullptr ? *scores : 0;
    const float norm = head.value_norms != nullptr ? *norms : 1;
    work.orders[i] = order_of({policy.importance(score, norm, position, next), position, i});
  }
  __syncthreads();
  const auto n_evicted =
      static_cast<int32_t>(keys.kept + int64_t{segment.n_rows} - policy.budget());
  const uint64_t last = select(work.orders, n, n_evicted, bins);
  const auto goes = [&](int32_t i) { return work.orders[i] <= last; };

  // Free slots, in order: those of evicted tokens, then the ones that held none before.
  const int32_t n_free = number(written, scratch, goes, [&](int32_t i, int32_t index, bool is) {
    if (is) work.free[index] = i;
  });
  __syncthreads();
  const auto free_slot = [&](int32_t i) {
    return i < n_free ? work.free[i] : keys.first + i - n_free;
  };
  const int32_t n_entering = number(
      segment.n_rows, scratch, [&](int32_t row) { return !goes(head.slots + row); },
      [&](int32_t row, int32_t index, bool is) { work.to[row] = is ? free_slot(index) : -1; });

  if (segment.rolling) {
    // Ranks close up: by rank, how many go before; then the same for every slot that stays.
    for (int32_t i = threadIdx.x; i < written; i += kThreads) {
      if (i != dead) work.closed[head.ranks[i]] = goes(i);
    }
    __syncthreads();
    number(
        keys.kept, scratch, [&](int32_t rank) { return work.closed[rank] != 0; },
        [&](int32_t rank, int32_t index, bool) { work.closed[rank] = index; });
    __syncthreads();
    for (int32_t i = threadIdx.x; i < written; i += kThreads) {
      if (i != dead && !goes(i)) head.ranks[i] -= work.closed[head.ranks[i]];
    }
    __syncthreads();
    number(
        segment.n_rows, scratch, [&](int32_t row) { return work.to[row] >= 0; },
        [&](int32_t row, int32_t index, bool is) {
          if (is) head.ranks[work.to[row]] = keys.kept - n_free + index;
        });
  }
  // slots = budget + 1: exactly one is left.
  if (threadIdx.x == 0) *head.next_slot = free_slot(n_entering);
}

__global__ void __launch_bounds__(kThreads) admit_kernel(KvView cache, Segment segment) {
  __shared__ Victim scratch[kThreads / kWarp];
  let_next_start();
  wait_for_previous();
  const SegmentKeys keys(cache, segment, blockIdx.x);
  __syncthreads();  // all have read next_slot
  if (keys.fits) {
    const float* scores = keys.head.scores;
    const auto load = [&](const int32_t* slots, float* loaded) {
#pragma unroll
      for (int i = 0; i < kSlotsAtOnce; ++i) loaded[i] = scores != nullptr ? scores[slots[i]] : 0;
    };
    select_next_slot(keys.head, segment, keys.kept + segment.n_rows, scratch, load,
                     [](int32_t, float) {});
  } else {
    admit_rows(cache, segment, keys);
  }
}

__device__ void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if ((bytes | reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 == 0) {
    for (int64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else {
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
  }
}

// One block for each (row, kv_head): the rows that stay move from the chunk to their slots.
__global__ void move_kernel(KvView cache, Segment segment) {
  let_next_start();
  wait_for_previous();
  const KvHead head = cache.head(segment.sequence, blockIdx.y);
  if (head.policy.kept(segment.position) + int64_t{segment.n_rows} <= head.slots) return;
  const int32_t row = blockIdx.x;
  const int32_t slot = Admission(cache, blockIdx.y).to[row];
  if (slot < 0) return;
  const KvRow from = chunk_row(cache, head, cache.chunk(blockIdx.y, segment.row), row);
  const KvRow to = slot_row(cache, head, slot);
  copy_bytes(to.k, from.k, cache.k_row_bytes);
  copy_bytes(to.v, from.v, cache.v_row_bytes);
  if (threadIdx.x > 0) return;
  if (to.score != nullptr) *to.score = *from.score;
  if (to.value_norm != nullptr) *to.value_norm = *from.value_norm;
  head.positions[slot] = segment.position + row;
}

}  // namespace

size_t admit_workspace(const KvView& shape) { return shape.n_kv_heads * Admission::bytes(shape); }

void admit(const Stream& stream, const KvView& cache, const Segment& segment) {
  launch(stream, admit_kernel, dim3(cache.n_kv_heads), dim3(kThreads), 0, cache, segment);
  launch(stream, move_kernel, dim3(segment.n_rows, cache.n_kv_heads), dim3(kWarp), 0, cache,
         segment);
}

}  // namespace h2o::cuda
