#include "cpu/attention/segment_head.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kv/range.h"

namespace h2o {
namespace {

// Hardware prefetchers read on from there.
constexpr int64_t kPrefetched = 4096;  // bytes
constexpr int64_t kLineBytes = 64;

// Into the L2 cache: L1 supports fewer outstanding requests.
void prefetch(const std::byte* rows, int64_t n_bytes) {
  // GCC removes calls of a function that only prefetches.
  __asm__ volatile("" : : "r"(rows));
  const int64_t end = std::min(n_bytes, kPrefetched);
  for (int64_t at = 0; at < end; at += kLineBytes) __builtin_prefetch(rows + at, 0, 2);
}

int64_t clamp_row(DType dtype, float* x, int64_t n) {
  const float most = most_stored(dtype);
  int64_t n_clamped = 0;
  for (int64_t i = 0; i < n; ++i) n_clamped += clamp_to(most, x[i]) ? 1 : 0;
  return n_clamped;
}

}  // namespace

void SegmentHead::prefetch_next() const {
  const int64_t next = int64_t{segment_.sequence} * cache_.n_kv_heads + kv_head_ + 1;
  if (next == int64_t{cache_.n_sequences} * cache_.n_kv_heads) return;
  const auto prefetch_first = [&](const std::byte* rows, int64_t row_bytes) {
    prefetch(rows + next * cache_.slots * row_bytes, n_before_ * row_bytes);
  };
  prefetch_first(cache_.k, cache_.k_row_bytes);
  prefetch_first(cache_.v, cache_.v_row_bytes);
}

// The norm selected by policy.value_norm, in f32 and in fixed order; finite for any v, so that
// importances can be ordered.
float SegmentHead::value_norm(const CpuKernels& kernels, const float* v, float* scratch) const {
  const int64_t n = cache_.head_dim;
  float sum = 0;
  if (head_.policy.value_norm == ValueNorm::output) {
    const float* const gram = cache_.output_gram + kv_head_ * n * n;
    kernels.f32.matmul({.y = scratch,
                        .x = v,
                        .w = reinterpret_cast<const std::byte*>(gram),
                        .bias = nullptr,
                        .n_rows = 1,
                        .n_in = n,
                        .w_row_bytes = n * int64_t{sizeof(float)},
                        .y_stride = n,
                        .add = false},
                       0, n);
    for (int64_t i = 0; i < n; ++i) sum += v[i] * scratch[i];
    sum = sum > 0 ? std::sqrt(sum) : 0;  // rounding may make it negative
  } else {
    for (int64_t i = 0; i < n; ++i) sum += std::abs(v[i]);
  }
  constexpr float kLargest = std::numeric_limits<float>::max();
  return sum < kLargest ? sum : kLargest;
}

int64_t SegmentHead::store(const CpuKernels& kernels, const Attention& attention, int32_t row,
                           float* scratch) const {
  const KvRow to =
      fits_ ? slot_row(cache_, head_, first_ + row) : chunk_row(cache_, head_, chunk_, row);
  const int64_t column = int64_t{kv_head_} * cache_.head_dim;
  float* k = attention.k.floats() + (segment_.row + row) * attention.k.cols + column;
  float* v = attention.v.floats() + (segment_.row + row) * attention.v.cols + column;
  const int64_t n_clamped =
      clamp_row(cache_.k_dtype, k, cache_.head_dim) + clamp_row(cache_.v_dtype, v, cache_.head_dim);
  kernels.of(cache_.k_dtype).encode(to.k, k, cache_.head_dim);
  kernels.of(cache_.v_dtype).encode(to.v, v, cache_.head_dim);
  if (to.score != nullptr) *to.score = 0.0f;
  if (to.value_norm != nullptr) *to.value_norm = value_norm(kernels, v, scratch);
  if (fits_) {
    head_.positions[first_ + row] = segment_.position + row;
    if (segment_.rolling) head_.ranks[first_ + row] = kept_ + row;
  }
  return n_clamped;
}

}  // namespace h2o
