// Matmul of quantized weights in 8-bit integers, compiled once per instruction set (see
// cpu/kernels-inl.h).
//
// x is first rounded to 8 bits, with a scale for every 32 elements. A panel of columns is unpacked
// to bytes, with kWidth columns interleaved, four bytes each; interleaved weights that unpack fast
// are read in place instead. Then every row is multiplied with the panel: integer products of four
// are summed exactly in the lanes of the columns, and once per group of weights they are scaled and
// accumulated in float. An output is thus one sum over groups in order, with operations that no
// instruction set may fuse: it is bit-identical on all of them, and for every batch and range of
// columns.
//
// A single row reads each weight once, so nothing is repacked for it: see int8_row-inl.h.
//
// Requires from vec_*.h, in addition to kernels-inl.h and int8_panel-inl.h: kTileRows; load_quads
// and broadcast_quad of four bytes per lane.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/matmul/int8_panel-inl.h"

namespace h2o {
namespace {

// A tile of rows of x: four elements are broadcast to the lanes.
using QuadTile = RowTile<kTileRows, kQuad>;
static_assert(CpuKernels{}.row_multiple % kTileRows == 0);

void quantize_rows(const Int8Rows& to, const float* x, int64_t begin, int64_t end) {
  if (to.group == kActivations) {
    return quantize_rows_in_groups<QuadTile, kActivations>(to, x, begin, end);
  }
  quantize_rows_in_groups<QuadTile, kInt8Group>(to, x, begin, end);
}

// The form of a panel that a product depends on: types that agree in it share the code.
template <int64_t kGroupElements, bool kHasMins, bool kIsSigned>
struct PanelForm {
  static constexpr int64_t kGroup = kGroupElements;
  static constexpr bool kMins = kHasMins, kSigned = kIsSigned;
};
template <class Type>
using FormOf = PanelForm<Type::kGroup, Type::kMins, Type::kSigned>;

// The weights of a panel.
template <class FormType>
struct PanelWeights {
  using Form = FormType;
  static constexpr int kUnrolled = kQuad;  // elements

  const Panel& panel;
  int32_t offset;

  // Four elements from e of group g in vector j of columns, and their scales.
  H2O_INLINE Ints quads(int64_t g, int e, int j) const {
    return load_quads(panel.q + (g * Form::kGroup + e) * kColumns + j * kWidth * kQuad);
  }
  H2O_INLINE Vec scale(int64_t g, int j) const {
    return load(panel.scales + g * kColumns + j * kWidth);
  }
  H2O_INLINE Vec min(int64_t g, int j) const {
    return load(panel.mins + g * kColumns + j * kWidth);
  }
};

// Reads interleaved columns in place. Those past `end` repeat the first; their sums are
// unused.
template <class Type>
struct InterleavedWeights {
  using Form = FormOf<Type>;
  static constexpr int kUnrolled = Type::kGroup;
  static constexpr int32_t offset = Type::kOffset;
  static constexpr int64_t kGroups = Type::kBlock / Type::kGroup;

  const std::byte* strips[kColumns / kInterleaved];

  InterleavedWeights(const Matmul& m, int64_t begin, int64_t end) {
    for (int64_t v = 0; v < kColumns; v += kInterleaved) {
      strips[v / kInterleaved] = m.w + (begin + v < end ? begin + v : begin) * m.w_row_bytes;
    }
  }
  H2O_INLINE Ints quads(int64_t g, int e, int j) const {
    const int at = static_cast<int>(g % kGroups * Type::kGroup);
    return interleaved_quads<Type>(block(g, j), at / 32 * 32, at % 32 + e, j % kStripVectors);
  }
  H2O_INLINE Vec scale(int64_t g, int j) const { return scales(g, j).scale(g % kGroups); }

 private:
  H2O_INLINE const std::byte* block(int64_t g, int j) const {
    constexpr int64_t kBlockBytes = kInterleaved * sizeof(typename Type::Block);
    return strips[j / kStripVectors] + g / kGroups * kBlockBytes;
  }
  H2O_INLINE BlockScales<Type> scales(int64_t g, int j) const {
    return {block(g, j), j % kStripVectors * kWidth};
  }
};

// Multiplies R rows of x, at the tile's elements from k on, with n elements of kColumns columns.
// `first`: there are no sums yet.
template <int R, class Weights>
void int8_tile(const Weights& weights, const Int8Rows& x, float* sums_of_tile, int64_t n,
               bool first) {
  using Form = typename Weights::Form;
  // Unrolled here: GCC 12 otherwise keeps these arrays in memory with -O2, not in registers.
  Vec totals[R][kTileVectors];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kTileVectors; ++j) {
      totals[i][j] = first ? zero() : load(sums_of_tile + i * kColumns + j * kWidth);
    }
  }
  const int8_t* x_q = x.q;
  for (int64_t g = 0; g < n / Form::kGroup; ++g) {
    const int32_t* x_sums = x.sums + g * R;
    const float* x_scales = x.scales + g * Form::kGroup / kActivations * R;
    Ints dots[R][kTileVectors];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const Ints start = ints(dot_start<Form>(x_sums[i], weights.offset));
#pragma GCC unroll 16
      for (int j = 0; j < kTileVectors; ++j) dots[i][j] = start;
    }
    for (int part = 0; part < Form::kGroup; part += Weights::kUnrolled) {
#pragma GCC unroll 8
      for (int e = part; e < part + Weights::kUnrolled; e += kQuad) {
        Ints w[kTileVectors];
#pragma GCC unroll 16
        for (int j = 0; j < kTileVectors; ++j) w[j] = weights.quads(g, e, j);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
          const Ints xq = broadcast_quad(x_q + i * kQuad);
#pragma GCC unroll 16
          for (int j = 0; j < kTileVectors; ++j) dots[i][j] = dot<Form>(dots[i][j], w[j], xq);
        }
        x_q += R * kQuad;
      }
    }
#pragma GCC unroll 16
    for (int j = 0; j < kTileVectors; ++j) {
      const Vec scale = weights.scale(g, j);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const Vec d = mul(scale, broadcast(x_scales[i]));
        totals[i][j] = add(totals[i][j], mul(to_float(dots[i][j]), d));
      }
      if constexpr (Form::kMins) {
        const Vec min = weights.min(g, j);
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

// Computes n_rows <= R rows.
template <int R, class Weights>
void int8_tile_of(int64_t n_rows, const Weights& weights, const Int8Rows& x, float* sums, int64_t n,
                  bool first) {
  if constexpr (R > 1) {
    if (n_rows < R) return int8_tile_of<R - 1>(n_rows, weights, x, sums, n, first);
  }
  int8_tile<R>(weights, x, sums, n, first);
}

// At most so many rows are multiplied with interleaved weights in place. More are multiplied with
// panels, unless weights are bytes already; so are all rows, if unpacking takes long.
template <class Type>
constexpr int64_t kRowsInPlace = 0;
template <>
constexpr int64_t kRowsInPlace<Int8Q8_0> = INT64_MAX;
template <>
constexpr int64_t kRowsInPlace<Int8IQ4_XS> = kTileRows;

// All rows times columns [begin, end) of interleaved weights in place.
template <class Type>
void multiply_in_place(const Matmul& m, const Int8Rows& x, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; o += kColumns) {
    const InterleavedWeights<Type> weights(m, o, end);
    const int64_t n_columns = end - o < kColumns ? end - o : kColumns;
    for (int64_t r = 0; r < m.n_rows; r += QuadTile::kRows) {
      const QuadTile tile(r, m.n_rows);
      const Int8Rows from = rows_from<Type>(x, r, tile.n, 0);
      alignas(kLine) float sums[kTileRows * kColumns];
      int8_tile_of<kTileRows>(tile.n, weights, from, sums, m.n_in, true);
      for (int64_t i = 0; i < tile.n; ++i) {
        write_outputs(m, r + i, o, n_columns, sums + i * kColumns);
      }
    }
  }
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
  if constexpr (kIsInterleaved && kRowsInPlace<Type> > 0) {
    if (m.n_rows <= kRowsInPlace<Type>) return multiply_in_place<Type>(m, x, begin, end);
  }
  const auto multiply = [](const Panel& panel, const Int8Rows& from, float* sums, int64_t n_rows,
                           int64_t n, bool first) {
    const PanelWeights<FormOf<Type>> weights{panel, Type::kOffset};
    int8_tile_of<kTileRows>(n_rows, weights, from, sums, n, first);
  };
  multiply_panels<Type, kIsInterleaved, QuadTile>(m, x, begin, end, workspace, multiply);
}

}  // namespace
}  // namespace h2o
