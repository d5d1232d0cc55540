// Two launches: the first estimates the largest q.k of every page, the second selects the pages
// with the largest estimates. Matches the CPU's recall.cpp up to the rounding of estimates.
#include <algorithm>
#include <cmath>

#include "cuda/attention/block_select.cuh"
#include "cuda/attention/kv_types.cuh"
#include "cuda/attention/recall_step.cuh"
#include "cuda/runtime/launch.cuh"
#include "kv/page_estimate.h"

namespace h2o::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int32_t kMaxBlocks = 64;  // maximum blocks that divide the pages of a kv_head

// Called by a warp: the estimate of one query from the bounds of a page's keys.
__device__ float estimate_by(const float* q, const float* bounds, int32_t head_dim) {
  const auto product = [&](int32_t i) {
    return bounds[i] * (i < head_dim ? weight_of_upper(q[i]) : weight_of_lower(q[i - head_dim]));
  };
  float sum = 0;
  for (auto pair = static_cast<int32_t>(threadIdx.x % kWarp); pair < head_dim; pair += kWarp) {
    sum += product(2 * pair) + product(2 * pair + 1);
  }
  return warp_sum(sum);
}

// Called by a warp: the upper bounds of a page's keys, then the lower. A lane writes the elements
// that it reads in estimate_by().
__device__ void load_bounds(float* bounds, const RecallStep& step, const ArchiveHead& head,
                            int32_t page) {
  const int32_t head_dim = step.cache.head_dim;
  const KeyGrid grid = step.archive.grid(head, page, head_dim);
  const auto* pairs =
      reinterpret_cast<const uint32_t*>(head.bounds + page * step.archive.bounds_bytes);
  for (auto pair = static_cast<int32_t>(threadIdx.x % kWarp); pair < head_dim; pair += kWarp) {
    const int32_t i = 2 * pair;
    if (step.archive.has_grids()) {
      const bool is_upper = i < head_dim;
      bounds[i] = is_upper ? grid.highest(i) : grid.lowest(i - head_dim);
      bounds[i + 1] = is_upper ? grid.highest(i + 1) : grid.lowest(i + 1 - head_dim);
    } else {
      const uint32_t bits = pairs[pair];
      bounds[i] = __uint_as_float(bits << 16);
      bounds[i + 1] = __uint_as_float(bits & 0xffff0000u);
    }
  }
}

// One block per (row or all rows of a chunk, kv_head, some of the pages); one page per warp. Bounds
// are read once for all rows of a chunk.
__global__ void __launch_bounds__(kWarps* kWarp) estimate_kernel(RecallStep step, int32_t rows) {
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int32_t head_dim = step.cache.head_dim;
  const int32_t kv_head = blockIdx.y;
  const RecallRow first(step, static_cast<int32_t>(blockIdx.x) * rows, kv_head);
  if (!first.recalls) return;
  const ArchiveHead head = first.head(step, kv_head);
  float* const bounds = dynamic_shared<float>() + warp * 2 * head_dim;

  const auto apart = static_cast<int32_t>(gridDim.z) * kWarps;
  for (auto page = static_cast<int32_t>(blockIdx.z) * kWarps + warp; page < first.n_pages;
       page += apart) {
    const bool empty = head.counts[page] == 0;
    load_bounds(bounds, step, head, page);
    const float* q = first.queries(step, kv_head);
    float* estimates = first.estimates(step, kv_head);
    for (int32_t i = 0; i < rows; ++i) {
      float estimate = kMinEstimate;
      for (int32_t h = 0; h < step.group(); ++h) {
        estimate = larger_estimate(estimate, estimate_by(q + h * head_dim, bounds, head_dim));
      }
      if (lane == 0) estimates[page] = empty ? -INFINITY : estimate;
      q += int64_t{step.cache.n_heads} * head_dim;
      estimates += int64_t{step.cache.n_kv_heads} * step.archive.n_pages;
    }
  }
}

// The order of EstimatedPage::before(). Pages that must not be selected sort last.
__device__ uint64_t order_of_page(const float* estimates, int32_t page) {
  const float estimate = estimates[page];
  return estimate == -INFINITY ? kLastOrder : make_order(-estimate, static_cast<uint32_t>(page));
}

// One block per (row, kv_head).
__global__ void __launch_bounds__(kSelectThreads) select_kernel(RecallStep step) {
  __shared__ int32_t scratch[kSelectThreads / kWarp];
  let_next_start();
  wait_for_previous();
  const RecallRow row(step, static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(blockIdx.y));
  if (!row.recalls) return;
  const float* estimates = row.estimates(step, blockIdx.y);
  int32_t* const pages = row.pages(step, blockIdx.y);
  const auto order = [&](int32_t page) { return order_of_page(estimates, page); };

  const int32_t n_filled = number(
      row.n_pages, scratch, [&](int32_t page) { return order(page) != kLastOrder; },
      [](int32_t, int32_t, bool) {});
  const int32_t n = min(n_filled, step.archive.n_recalled);
  for (auto i = static_cast<int32_t>(n + threadIdx.x); i < step.archive.n_recalled;
       i += kSelectThreads) {
    pages[i] = -1;
  }
  if (n == 0) return;
  const uint64_t last = select(row.n_pages, n, order);
  number(
      row.n_pages, scratch, [&](int32_t page) { return order(page) <= last; },
      [&](int32_t page, int32_t index, bool is) {
        if (is) pages[index] = page;
      });
}

}  // namespace

void select_pages(const Stream& stream, const RecallStep& step) {
  const bool is_chunk = step.segments == nullptr;
  const int32_t n_blocks = std::min((step.archive.n_pages + kWarps - 1) / kWarps, kMaxBlocks);
  launch(stream, estimate_kernel, dim3(is_chunk ? 1 : step.n_rows, step.cache.n_kv_heads, n_blocks),
         dim3(kWarps * kWarp), size_t{kWarps} * 2 * step.cache.head_dim * sizeof(float), step,
         is_chunk ? step.n_rows : 1);
  launch(stream, select_kernel, dim3(step.n_rows, step.cache.n_kv_heads), dim3(kSelectThreads), 0,
         step);
}

}  // namespace h2o::cuda
