// Keys and values as tensor cores take them: tiles of f16 rows in shared memory.
#pragma once

#include "cuda/prefill_step.cuh"
#include "cuda/ptx.cuh"

namespace h2o::cuda {

// Where the keys or the values of a segment are, as f16: in the cache, or unpacked in the
// workspace. As SegmentKeys, in fewer registers.
struct HalfRows {
  // In the cache.
  __device__ HalfRows(const SegmentKeys& keys, const std::byte* slots, const std::byte* chunk,
                      int64_t row_bytes)
      : old(slots),
        own((keys.fits ? slots + keys.first * row_bytes : chunk) - keys.kept * row_bytes),
        row_bytes(static_cast<int32_t>(row_bytes)),
        gap(keys.first),
        kept(keys.kept) {}

  // In the workspace, one after another.
  __device__ HalfRows(const uint16_t* halves, int32_t row_halves)
      : old(nullptr),
        own(reinterpret_cast<const std::byte*>(halves)),
        row_bytes(row_halves * 2),
        gap(0),
        kept(0) {}

  __device__ const std::byte* row(int32_t i) const {
    if (i >= kept) return own + int64_t{i} * row_bytes;
    return old + int64_t{i + (i >= gap)} * row_bytes;
  }

  const std::byte* old;  // what the cache kept
  const std::byte* own;  // what would be key 0, if the segment's rows were all
  int32_t row_bytes;
  int32_t gap;  // the dead slot
  int32_t kept;
};

__device__ inline HalfRows key_rows(const PrefillStep& step, const SegmentKeys& keys,
                                    int32_t kv_head) {
  if (step.k_halves != nullptr) {
    return {step.k_halves + step.first_unpacked(kv_head), step.cache.head_dim};
  }
  return {keys, keys.head.k, keys.chunk.k, step.cache.k_row_bytes};
}

__device__ inline HalfRows value_rows(const PrefillStep& step, const SegmentKeys& keys,
                                      int32_t kv_head) {
  if (step.v_halves != nullptr) {
    return {step.v_halves + step.first_unpacked(kv_head), step.cache.head_dim};
  }
  return {keys, keys.head.v, keys.chunk.v, step.cache.v_row_bytes};
}

// How far apart rows lie in shared memory: eight of them begin in different banks.
template <int kDim>
constexpr int kTileStride = kDim * 2 + 16;

// Copies rows [first, first + kRows) of n to `tile`, by kThreads threads; zeros past n.
template <int kDim, int kRows, int kThreads>
__device__ inline void copy_rows_async(uint32_t tile, const HalfRows& rows, int32_t first,
                                       int32_t n) {
  constexpr int kPieces = kDim / 8;  // of a row, 16 bytes each
  static_assert(kRows * kPieces % kThreads == 0);
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int piece = threadIdx.x + i * kThreads;
    const int row = piece / kPieces;
    const int byte = piece % kPieces * 16;
    const bool exists = first + row < n;
    const std::byte* from = rows.row(exists ? first + row : 0) + byte;
    copy_16_async(tile + row * kTileStride<kDim> + byte, from, exists);
  }
}

// The part of a row address for load_matrices() that depends on the lane. The four matrices are:
// upper left, lower left, upper right, lower right of 16 x 16 elements ...
template <int kDim>
__device__ inline uint32_t lane_offset_rows_first(int lane) {
  return lane % 16 * kTileStride<kDim> + lane / 16 * 16;
}

// ... or upper left, upper right, lower left, lower right.
template <int kDim>
__device__ inline uint32_t lane_offset_columns_first(int lane) {
  return (lane % 8 + lane / 16 * 8) * kTileStride<kDim> + lane / 8 % 2 * 16;
}

}  // namespace h2o::cuda
