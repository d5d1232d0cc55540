#include "cuda/attention/admission.cuh"
#include "cuda/attention/archive_types.cuh"
#include "cuda/attention/attend.h"
#include "cuda/attention/drafts.h"
#include "cuda/runtime/copy_bytes.cuh"
#include "cuda/runtime/launch.cuh"
#include "kv/archive.h"
#include "kv/rows.h"

namespace h2o::cuda {
namespace {

// The tokens of one kv_head that a segment evicts.
struct Evicted {
  __device__ Evicted(const KvView& cache, const Segment& segment, int32_t kv_head)
      : cache(cache),
        segment(segment),
        head(cache.head(segment.sequence, kv_head)),
        chunk(cache.chunk(kv_head, segment.row)),
        slots(Admission(cache, kv_head).evicted),
        all(head.policy.kept(segment.position) + int64_t{segment.n_rows}),
        n(head.evicts() ? all - head.policy.budget() : 0) {}

  // The slot of token i, in eviction order. A segment whose rows fit evicts at most one token,
  // which stays in its slot until the next token is stored.
  __device__ int32_t slot(int64_t i) const {
    return all <= head.slots ? *head.next_slot : slots[i];
  }
  __device__ int32_t position(int64_t i) const {
    const int32_t s = slot(i);
    return s < head.slots ? head.positions[s] : segment.position + s - head.slots;
  }
  __device__ KvRow row(int64_t i) const {
    const int32_t s = slot(i);
    return s < head.slots ? slot_row(cache, head, s)
                          : chunk_row(cache, head, chunk, s - head.slots);
  }

  const KvView& cache;
  const Segment& segment;
  const KvHead head;
  const KvStaging chunk;
  const int32_t* slots;  // if the rows did not fit
  const int64_t all;     // tokens before eviction
  const int64_t n;
};

// The cached keys of a page: at most one per position, else nullptr.
using PageKeys = const std::byte* [kGridPageTokens];

__device__ void find_keys(PageKeys& keys, const Evicted& evicted, int32_t page) {
  const KvHead& head = evicted.head;
  const Segment& segment = evicted.segment;
  const bool fits = evicted.all <= head.slots;
  const int32_t written = fits ? static_cast<int32_t>(evicted.all) : head.written(segment.position);
  const int32_t vacant = fits ? -1 : head.vacant_slot(segment.position);
  const auto add = [&](int32_t position, const std::byte* k) {
    if (position / kGridPageTokens == page) keys[position % kGridPageTokens] = k;
  };
  for (int32_t i = threadIdx.x; i < kGridPageTokens; i += kWarp) keys[i] = nullptr;
  __syncthreads();
  for (int32_t i = threadIdx.x; i < written; i += kWarp) {
    if (i != vacant) add(head.positions[i], slot_row(evicted.cache, head, i).k);
  }
  for (int32_t i = threadIdx.x; i < segment.n_rows && !fits; i += kWarp) {
    add(segment.position + i, chunk_row(evicted.cache, head, evicted.chunk, i).k);
  }
  __syncthreads();
}

// Fits a page's grid, and its copy, to these keys. Each thread has its own elements.
__device__ void fit(const KeyGrid& grid, const KeyGrid& copy, const PageKeys& keys, DType type,
                    int head_dim) {
  for (int i = threadIdx.x; i < head_dim; i += kWarp) {
    float largest = -INFINITY, smallest = INFINITY;
    for (const std::byte* key : keys) {
      if (key == nullptr) continue;
      const float x = element(type, key, i);
      largest = fmaxf(largest, x);
      smallest = fminf(smallest, x);
    }
    grid.fit(i, smallest, largest);
    copy.fit(i, smallest, largest);
  }
}

// Writes a row of the cache to the archive, in q3 as the grid's codes. A row that is converted goes
// through `scratch` [head_dim] and `stored`, which are shared.
__device__ void store(DType from_type, const std::byte* from, DType to_type, std::byte* to,
                      int64_t row_bytes, const KeyGrid& grid, int head_dim, float* scratch,
                      std::byte* stored) {
  if (from_type == to_type) return copy_bytes(to, from, row_bytes);
#pragma unroll 1  // calls for divisions would spill the others
  for (int i = threadIdx.x; i < head_dim; i += kWarp) {
    const float x = element(from_type, from, i);
    scratch[i] = to_type == DType::q3 ? grid.code(i, x) : x;
  }
  __syncthreads();
  write_archived(to_type, stored, scratch, head_dim);
  __syncthreads();
  copy_bytes(to, stored, row_bytes);
  __syncthreads();
}

// The bounds of `count` keys of a page, unless it has a grid, and a copy of them in `host`:
// elements are exact products, so sums with them round as on the CPU, fused or not. Each thread has
// its own elements.
__device__ void bound(const ArchiveLayout& archive, const ArchiveHead& head,
                      const ArchiveHead& host, int32_t page, int32_t count, int head_dim) {
  if (archive.has_grids()) return;
  auto* const bounds = reinterpret_cast<__nv_bfloat16*>(head.bounds + page * archive.bounds_bytes);
  auto* const copy = reinterpret_cast<__nv_bfloat16*>(host.bounds + page * archive.bounds_bytes);
  const DType type = archive.k_dtype;
  const int64_t row_bytes = archive.k_row_bytes;
  const std::byte* const k = head.k + int64_t{page} * archive.page_tokens * row_bytes;
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    float sum = element(type, k, i);
    float largest = sum, smallest = sum;
    for (int32_t t = 1; t < count; ++t) {
      const float key = element(type, k + t * row_bytes, i);
      largest = fmaxf(largest, key);
      smallest = fminf(smallest, key);
      sum += key;
    }
    const float mean = sum / static_cast<float>(count);
    const float half_range = (largest - smallest) / 2;
    copy[i] = bounds[i] = __float2bfloat16_rn(mean + half_range);
    copy[head_dim + i] = bounds[head_dim + i] = __float2bfloat16_rn(mean - half_range);
  }
}

// One warp per (segment of one row, kv_head), or per (token that the chunk evicts, kv_head): the
// warp of a page's first token archives the tokens of that page that follow, in order.
__global__ void __launch_bounds__(kWarp)
    archive_kernel(KvView cache, ArchiveLayout archive, const Segment* segments, Segment chunk) {
  __shared__ float scratch[kMaxHeadDim];
  __shared__ __align__(16) std::byte stored[kMaxHeadDim * sizeof(float)];
  __shared__ PageKeys keys;
  let_next_start();
  wait_for_previous();
  const bool decodes = segments != nullptr;
  const Segment segment = decodes ? segments[blockIdx.x] : chunk;
  if (decodes && segment.n_rows != 1) return;
  const int32_t kv_head = blockIdx.y;
  const int32_t index = cache.archive_heads[kv_head];
  if (index < 0) return;
  const Evicted evicted(cache, segment, kv_head);
  const int64_t first = decodes ? 0 : blockIdx.x;
  if (first >= evicted.n) return;

  const int32_t page_tokens = archive.page_tokens;
  const int32_t page = evicted.position(first) / page_tokens;
  for (int64_t i = 0; i < first; i += kWarp) {
    const int64_t before = i + threadIdx.x;
    if (__any_sync(kAllLanes, before < first && evicted.position(before) / page_tokens == page)) {
      return;
    }
  }
  const ArchiveMemory memory = cache.archives[segment.sequence];
  const ArchiveHead head = archive.head(memory, index);
  const ArchiveHead host = archive.head(memory.pages, index);
  const KeyGrid grid = archive.grid(head, page, cache.head_dim);
  int32_t count = head.counts[page];
  if (archive.has_grids() && count == 0) {
    find_keys(keys, evicted, page);
    fit(grid, archive.grid(host, page, cache.head_dim), keys, cache.k_dtype, cache.head_dim);
    __syncthreads();
  }
  for (int64_t i = first; i < evicted.n; ++i) {
    if (evicted.position(i) / page_tokens != page) continue;
    const KvRow row = evicted.row(i);
    const int32_t at = page * page_tokens + count;
    store(cache.v_dtype, row.v, archive.v_dtype, head.v + int64_t{at} * archive.v_row_bytes,
          archive.v_row_bytes, grid, cache.head_dim, scratch, stored);
    store(cache.k_dtype, row.k, archive.k_dtype, head.k + int64_t{at} * archive.k_row_bytes,
          archive.k_row_bytes, grid, cache.head_dim, scratch, stored);
    ++count;
  }
  __syncthreads();  // all threads have read the old count, and may read all keys
  bound(archive, head, host, page, count, cache.head_dim);
  if (threadIdx.x == 0) head.counts[page] = host.counts[page] = count;
}

// One warp per kv_head. Each draft was stored in the slot whose token the one before it evicted.
__global__ void __launch_bounds__(kWarp)
    remove_kernel(KvView cache, ArchiveLayout archive, KvUndo undo, Retracted drafts) {
  let_next_start();
  wait_for_previous();
  const int32_t kv_head = blockIdx.x;
  const int32_t index = cache.archive_heads[kv_head];
  if (index < 0) return;
  const ArchiveMemory memory = cache.archives[drafts.sequence];
  const ArchiveHead head = archive.head(memory, index);
  const ArchiveHead host = archive.head(memory.pages, index);
  const KvHead pool = cache.head(drafts.sequence, kv_head);
  const int32_t next_slot = *pool.next_slot;
  int32_t position = next_slot < pool.slots ? pool.positions[next_slot] : 0;
#pragma unroll
  for (int i = 0; i < kMostDrafts; ++i) {
    if (i == drafts.n) break;
    std::byte* const entry = undo.entry(cache, drafts.entries[i], kv_head);
    const int32_t length = drafts.length - 1 - i;  // without this draft
    if (KvUndo::archived(entry, pool, length)) {
      const int32_t page = position / archive.page_tokens;
      const int32_t count = head.counts[page] - 1;
      __syncthreads();
      if (threadIdx.x == 0) head.counts[page] = host.counts[page] = count;
      if (count > 0) bound(archive, head, host, page, count, cache.head_dim);
    }
    position = KvUndo::position(entry);
    __syncthreads();
  }
}

}  // namespace

void remove_archived(const Stream& stream, const KvView& cache, const KvUndo& undo,
                     const Retracted& drafts) {
  launch(stream, remove_kernel, dim3(cache.n_kv_heads), dim3(kWarp), 0, cache,
         cache.archive->layout(), undo, drafts);
}

void archive_evicted(const Stream& stream, const KvView& cache, const DeviceBatch& batch) {
  launch(stream, archive_kernel, dim3(batch.n_segments, cache.n_kv_heads), dim3(kWarp), 0, cache,
         cache.archive->layout(), batch.segments, Segment{});
}

void archive_evicted(const Stream& stream, const KvView& cache, const Segment& segment) {
  launch(stream, archive_kernel, dim3(segment.n_rows, cache.n_kv_heads), dim3(kWarp), 0, cache,
         cache.archive->layout(), nullptr, segment);
}

}  // namespace h2o::cuda
