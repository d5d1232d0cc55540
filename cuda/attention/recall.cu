#include <numbers>

#include "cuda/attention/archive_types.cuh"
#include "cuda/attention/prefill_step.cuh"
#include "cuda/attention/recall.h"
#include "cuda/attention/recall_step.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kHeadsAtOnce = 8;  // whose sums a thread keeps in registers

// One block per (row, kv_head, n_pages of its pages). Their keys, then their values, in host
// memory, are copied to shared memory all at once: their latency is that of a bus.
__global__ void __launch_bounds__(kThreads) recall_kernel(RecallStep step, int32_t n_pages) {
  __shared__ int32_t pages[kPartPages], counts[kPartPages];  // of tokens: 0 without a page
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int32_t head_dim = step.cache.head_dim;
  const int32_t group = step.group();
  const int32_t kv_head = blockIdx.y;
  const auto part = static_cast<int32_t>(blockIdx.z);
  const RecallRow row(step, static_cast<int32_t>(blockIdx.x), kv_head);
  if (!row.recalls) return;
  const ArchiveHead head = row.head(step, kv_head);
  const ArchiveLayout& archive = step.archive;
  const int32_t page_tokens = archive.page_tokens;
  const int32_t n_tokens = n_pages * page_tokens;
  float* const p = dynamic_shared<float>();  // [group, n_tokens] logits, then their exponentials
  float* const key = p + group * n_tokens + warp * head_dim;  // per warp
  auto* const rows = reinterpret_cast<std::byte*>(p + group * n_tokens + kWarps * head_dim);

  if (const auto own = static_cast<int32_t>(threadIdx.x); own < n_pages) {
    const int32_t index = part * n_pages + own;
    const int32_t page = index < archive.n_recalled ? row.pages(step, kv_head)[index] : -1;
    pages[own] = page;
    counts[own] = page >= 0 ? head.counts[page] : 0;
  }
  __syncthreads();
  const auto copy = [&](const std::byte* from, int64_t row_bytes) {
    const int64_t page_bytes = page_tokens * row_bytes;  // a multiple of 16
    for (int j = 0; j < n_pages; ++j) {
      for (int64_t i = threadIdx.x * 16; i < counts[j] * row_bytes; i += kThreads * 16) {
        copy_16_async(shared_address(rows + j * page_bytes + i), from + pages[j] * page_bytes + i,
                      true);
      }
    }
    commit_copies();
  };
  const auto exists = [&](int i) { return i % page_tokens < counts[i / page_tokens]; };
  copy(head.k, archive.k_row_bytes);
  wait_for_copies<0>();
  __syncthreads();

  for (int i = warp; i < n_tokens; i += kWarps) {
    if (!exists(i)) continue;
    // A lane only reads elements that it wrote itself.
    const std::byte* const from = rows + i * archive.k_row_bytes;
    const KeyGrid grid = archive.grid(head, pages[i / page_tokens], head_dim);
    for (int d = lane; d < head_dim; d += kWarp) key[d] = archived_key(archive, grid, from, d);
    const float* q = row.queries(step, kv_head);
    for (int h = 0; h < group; ++h, q += head_dim) {
      float sum = 0;
      for (int d = lane; d < head_dim; d += kWarp) sum = fmaf(q[d], key[d], sum);
      const float logit = warp_sum(sum) * step.scale;
      if (lane == 0) {
        p[h * n_tokens + i] = step.changes.softcap > 0 ? step.changes.capped(logit) : logit;
      }
    }
  }
  __syncthreads();
  copy(head.v, archive.v_row_bytes);

  const int64_t first =
      (int64_t{row.place} * step.cache.n_heads + kv_head * group) * step.space.sums.n + part;
  const auto sums_of = [&](int h) { return first + int64_t{h} * step.space.sums.n; };
  for (int h = warp; h < group; h += kWarps) {
    float* const own = p + h * n_tokens;
    float largest = -INFINITY;
    for (int i = lane; i < n_tokens; i += kWarp) {
      if (exists(i)) largest = fmaxf(largest, own[i]);
    }
    largest = warp_max(largest);
    float total = 0;
    for (int i = lane; i < n_tokens; i += kWarp) {
      own[i] = exists(i) ? exp_negative(own[i] - largest) : 0;
      total += own[i];
    }
    total = warp_sum(total);
    if (lane == 0) {
      step.space.sums.largest[sums_of(h)] = largest;
      step.space.sums.total[sums_of(h)] = total;
    }
  }
  wait_for_copies<0>();
  __syncthreads();

  for (int d = threadIdx.x; d < head_dim; d += kThreads) {
    for (int begin = 0; begin < group; begin += kHeadsAtOnce) {
      float sums[kHeadsAtOnce] = {};
      for (int i = 0; i < n_tokens; ++i) {
        if (!exists(i)) continue;
        const float value = archived_value(archive, rows + i * archive.v_row_bytes, d);
#pragma unroll
        for (int j = 0; j < kHeadsAtOnce; ++j) {
          const int h = min(begin + j, group - 1);
          sums[j] = fmaf(p[h * n_tokens + i], value, sums[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kHeadsAtOnce; ++j) {
        if (begin + j < group) step.space.sums.out[sums_of(begin + j) * head_dim + d] = sums[j];
      }
    }
  }
}

// One block per (row of the chunk, query head).
__global__ void __launch_bounds__(kThreads) add_kernel(RecallStep recall, PrefillStep step) {
  let_next_start();
  wait_for_previous();
  const auto head = static_cast<int32_t>(blockIdx.y);
  const int32_t kv_head = head / step.group;
  const RecallRow row(recall, static_cast<int32_t>(blockIdx.x), kv_head);
  if (!row.recalls) return;
  const int32_t t = (recall.first + row.place) * step.group + head % step.group;
  float* const lse = step.lse + step.first_query(kv_head) + t;
  float* const out = step.out + step.offset(kv_head, t);
  const RecalledSums& sums = recall.space.sums;
  const int64_t first = (int64_t{row.place} * recall.cache.n_heads + head) * sums.n;
  const auto largest_of = [&](int32_t part) {  // in base 2
    return sums.largest[first + part] * std::numbers::log2e_v<float>;
  };

  const float before = *lse;
  float largest = before;
  for (int32_t part = 0; part < sums.n; ++part) largest = fmaxf(largest, largest_of(part));
  const float own = exp2_negative(before - largest);
  float total = own;
  for (int32_t part = 0; part < sums.n; ++part) {
    total = fmaf(exp2_negative(largest_of(part) - largest), sums.total[first + part], total);
  }
  const int32_t head_dim = step.cache.head_dim;
  for (int d = threadIdx.x; d < head_dim; d += kThreads) {
    float sum = own * out[d];
    for (int32_t part = 0; part < sums.n; ++part) {
      sum = fmaf(exp2_negative(largest_of(part) - largest), sums.out[(first + part) * head_dim + d],
                 sum);
    }
    out[d] = sum / total;
  }
  __syncthreads();  // all threads have read it
  if (threadIdx.x == 0) *lse = largest + log2f(total);
}

RecallStep step_of(const Attention& attention, const KvView& cache, std::byte* workspace) {
  return {.cache = cache,
          .archive = cache.archive->layout(),
          .segments = nullptr,
          .chunk = {},
          .first = 0,
          .n_rows = 0,
          .q = attention.q.floats(),
          .scale = attention.scale,
          .changes = LogitChanges(attention, 1),
          .space = RecallSpace(cache, workspace)};
}

void launch_recall(const Stream& stream, const RecallStep& step) {
  select_pages(stream, step);
  const ArchiveLayout& archive = step.archive;
  const int32_t n_pages = part_pages(archive);
  const size_t n_tokens = n_pages * archive.page_tokens;
  const size_t shared =
      n_pages * page_bytes(archive) +
      (n_tokens * step.group() + size_t{kWarps} * step.cache.head_dim) * sizeof(float);
  launch(stream, recall_kernel, dim3(step.n_rows, step.cache.n_kv_heads, step.space.sums.n),
         dim3(kThreads), shared, step, n_pages);
}

}  // namespace

size_t recall_workspace(const KvView& shape) {
  return shape.archive == nullptr ? 0 : RecallSpace(shape, nullptr).bytes;
}

RecalledSums recall(const Stream& stream, const Attention& attention, const KvView& cache,
                    const DeviceBatch& batch, std::byte* workspace) {
  RecallStep step = step_of(attention, cache, workspace);
  step.segments = batch.segments;
  step.n_rows = batch.n_segments;
  launch_recall(stream, step);
  return step.space.sums;
}

void add_recalled(const Stream& stream, const Attention& attention, const PrefillStep& step,
                  std::byte* workspace) {
  RecallStep recall = step_of(attention, step.cache, workspace);
  recall.chunk = step.segment;
  for (; recall.first < step.segment.n_rows; recall.first += recall.n_rows) {
    recall.n_rows = std::min(kRecalledRows, step.segment.n_rows - recall.first);
    launch_recall(stream, recall);
    launch(stream, add_kernel, dim3(recall.n_rows, step.cache.n_heads), dim3(kThreads), 0, recall,
           step);
  }
}

}  // namespace h2o::cuda
