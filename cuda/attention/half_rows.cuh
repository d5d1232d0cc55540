// Tiles of f16 keys and values in shared memory, for tensor cores.
#pragma once

#include <type_traits>

#include "cuda/attention/prefill_step.cuh"
#include "cuda/runtime/ptx.cuh"

namespace h2o::cuda {

// Calls f with the size of rows in tiles for this head size, as a compile-time constant: the
// smallest that suffices. Does nothing if there is none.
template <class F>
void with_tile_dim(int head_dim, F f) {
  const auto suffices = [&](auto dim) {
    if (head_dim <= dim) f(dim);
    return head_dim <= dim;
  };
  using std::integral_constant;
  if (head_dim % 4 != 0) return;  // queries are read, and output is written, in vectors
  suffices(integral_constant<int, 64>()) || suffices(integral_constant<int, 80>()) ||
      suffices(integral_constant<int, 96>()) || suffices(integral_constant<int, 128>()) ||
      suffices(integral_constant<int, 256>());
}

// Locates the f16 rows that a block reads: keys or values of a segment, in the order of
// SegmentKeys.
template <int kDim>
struct HalfRows {
  // Rows in the cache.
  __device__ HalfRows(const SegmentKeys& keys, const std::byte* slots, const std::byte* chunk)
      : old(reinterpret_cast<const uint16_t*>(slots)),
        own(keys.fits ? old + (keys.first - keys.kept) * int64_t{kDim}
                      : reinterpret_cast<const uint16_t*>(chunk) - keys.kept * int64_t{kDim}),
        gap(keys.first),
        kept(keys.kept) {}

  // Rows in the workspace, contiguous.
  __device__ HalfRows(const uint16_t* rows, int32_t kept)
      : old(rows), own(rows), gap(kept), kept(kept) {}

  __device__ const uint16_t* row(int32_t i) const {
    return i >= kept ? own + int64_t{i} * kDim : old + int64_t{i + (i >= gap)} * kDim;
  }

  // Are rows `first` to `last` contiguous in memory?
  __device__ bool are_together(int32_t first, int32_t last) const {
    return first >= kept || (last < kept && (first >= gap || last < gap));
  }

  const uint16_t* old;  // cached rows
  const uint16_t* own;  // the segment's rows, as if preceded by the cached ones
  int32_t gap;          // the free slot
  int32_t kept;
};

template <int kDim>
__device__ HalfRows<kDim> key_rows(const PrefillStep& step, const SegmentKeys& keys,
                                   int32_t kv_head) {
  if (step.k_halves != nullptr) {
    return HalfRows<kDim>(step.k_halves + step.first_unpacked(kv_head), keys.kept);
  }
  return HalfRows<kDim>(keys, keys.head.k, keys.chunk.k);
}

template <int kDim>
__device__ HalfRows<kDim> value_rows(const PrefillStep& step, const SegmentKeys& keys,
                                     int32_t kv_head) {
  if (step.k_halves != nullptr) {
    return HalfRows<kDim>(step.v_halves + step.first_unpacked(kv_head), keys.kept);
  }
  return HalfRows<kDim>(keys, keys.head.v, keys.chunk.v);
}

// Row stride in shared memory: eight consecutive rows start in different banks.
template <int kDim>
constexpr int kTileStride = kDim * 2 + 16;

// Copies rows [first, first + kRows) of n to `tile` with kThreads threads; zeros past n.
template <int kRows, int kThreads, int kDim>
__device__ inline void copy_rows_async(uint32_t tile, const HalfRows<kDim>& rows, int32_t first,
                                       int32_t n) {
  constexpr int kPerRow = kDim / 8;  // 16-byte pieces
  constexpr int kPieces = kRows * kPerRow / kThreads;
  static_assert(kRows * kPerRow % kThreads == 0);
  const auto to = [&](int piece) {
    return tile + piece / kPerRow * kTileStride<kDim> + piece % kPerRow * 16;
  };
  if (first + kRows <= n && rows.are_together(first, first + kRows - 1)) {
    const uint16_t* from = rows.row(first) + threadIdx.x * 8;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      copy_16_async(to(threadIdx.x + i * kThreads), from + i * kThreads * 8, true);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kPieces; ++i) {
    const int piece = threadIdx.x + i * kThreads;
    const int row = first + piece / kPerRow;
    const uint16_t* from = rows.row(row < n ? row : 0) + piece % kPerRow * 8;
    copy_16_async(to(piece), from, row < n);
  }
}

// The lane-dependent part of a row address for load_matrices(). The four matrices are: upper left,
// lower left, upper right, lower right of 16 x 16 elements ...
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
