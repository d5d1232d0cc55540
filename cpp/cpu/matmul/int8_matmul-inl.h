// Matmul of quantized weights in 8-bit integers, compiled once per instruction set (see
// cpu/kernels-inl.h).
//
// x is first rounded to 8 bits, with a scale for every 32 elements. A panel of columns is unpacked
// to bytes, with kWidth columns interleaved, four bytes each. Then every row is multiplied with the
// panel: integer products of four are summed exactly in the lanes of the columns, and once per
// group of weights they are scaled and accumulated in float. An output is thus one sum over groups
// in order, with operations that no instruction set may fuse: it is bit-identical on all of them,
// and for every batch and range of columns.
//
// A single row reads each weight once, so nothing is repacked for it: see int8_row-inl.h.
//
// Requires from vec_*.h, in addition to kernels-inl.h and int8_panel-inl.h: kTileRows; load_quads
// and broadcast_quad of four bytes per lane.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/int8_panel-inl.h"

namespace h2o {
namespace {

// Of rows of x: four elements are broadcast to the lanes.
using QuadTile = RowTile<kTileRows, kQuad>;
static_assert(CpuKernels{}.row_multiple % kTileRows == 0);

void quantize_rows(const Int8Rows& to, const float* x, int64_t begin, int64_t end) {
  if (to.group == kActivations) {
    return quantize_rows_in_groups<QuadTile, kActivations>(to, x, begin, end);
  }
  quantize_rows_in_groups<QuadTile, kInt8Group>(to, x, begin, end);
}

// Multiplies R rows of x, at the tile's elements from k on, with a panel of depth n. `first`: there
// are no sums yet.
template <class Type, int R>
void int8_tile(const Panel& panel, const Int8Rows& x, float* sums_of_tile, int64_t n, bool first) {
  // Unrolled here: GCC 12 otherwise keeps these arrays in memory with -O2, not in registers.
  Vec totals[R][kTileVectors];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kTileVectors; ++j) {
      totals[i][j] = first ? zero() : load(sums_of_tile + i * kColumns + j * kWidth);
    }
  }
  const int8_t* w_q = panel.q;
  const int8_t* x_q = x.q;
  for (int64_t g = 0; g < n / Type::kGroup; ++g) {
    const int32_t* x_sums = x.sums + g * R;
    const float* x_scales = x.scales + g * Type::kGroup / kActivations * R;
    Ints dots[R][kTileVectors];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const Ints start = ints(dot_start<Type>(x_sums[i]));
#pragma GCC unroll 16
      for (int j = 0; j < kTileVectors; ++j) dots[i][j] = start;
    }
    for (int q = 0; q < Type::kGroup / kQuad; ++q) {
      Ints w[kTileVectors];
#pragma GCC unroll 16
      for (int j = 0; j < kTileVectors; ++j) w[j] = load_quads(w_q + j * kWidth * kQuad);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const Ints xq = broadcast_quad(x_q + i * kQuad);
#pragma GCC unroll 16
        for (int j = 0; j < kTileVectors; ++j) dots[i][j] = dot<Type>(dots[i][j], w[j], xq);
      }
      w_q += kColumns * kQuad;
      x_q += R * kQuad;
    }
#pragma GCC unroll 16
    for (int j = 0; j < kTileVectors; ++j) {
      const Vec scale = load(panel.scales + g * kColumns + j * kWidth);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const Vec d = mul(scale, broadcast(x_scales[i]));
        totals[i][j] = add(totals[i][j], mul(to_float(dots[i][j]), d));
      }
      if constexpr (Type::kMins) {
        const Vec min = load(panel.mins + g * kColumns + j * kWidth);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
          const float sum = x_scales[i] * static_cast<float>(x_sums[i]);
          totals[i][j] = add(totals[i][j], mul(min, broadcast(sum)));
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kTileVectors; ++j) {
      store(sums_of_tile + i * kColumns + j * kWidth, totals[i][j]);
    }
  }
}

// The same for n_rows <= R.
template <class Type, int R>
void int8_tile_of(int64_t n_rows, const Panel& panel, const Int8Rows& x, float* sums, int64_t n,
                  bool first) {
  if constexpr (R > 1) {
    if (n_rows < R) return int8_tile_of<Type, R - 1>(n_rows, panel, x, sums, n, first);
  }
  int8_tile<Type, R>(panel, x, sums, n, first);
}

template <class Type, bool kIsInterleaved>
void int8_matmul(const Matmul& m, const Int8Rows& x, int64_t begin, int64_t end,
                 std::byte* workspace) {
  if (m.n_rows == 1) {
    if constexpr (kIsInterleaved) {
      return interleaved_row<Type>(m, x, begin, end);
    } else {
      return int8_row<Type>(m, x, begin, end, workspace);
    }
  }
  const auto multiply = [](const Panel& panel, const Int8Rows& from, float* sums, int64_t n_rows,
                           int64_t n, bool first) {
    int8_tile_of<Type, kTileRows>(n_rows, panel, from, sums, n, first);
  };
  multiply_panels<Type, kIsInterleaved, QuadTile>(m, x, begin, end, workspace, multiply);
}

}  // namespace
}  // namespace h2o
