// Products of many rows of x with short rows of weights, such as queries with keys: bit-identical
// to matmul-inl.h and bf16_matmul-inl.h, whose outputs are sums over the lanes of a vector. Adding
// up these lanes takes as long as the products of a row of 64 elements. Here the lanes are rows of
// x instead, and the sums that were lanes there are added in the order of store_sums().
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/blocks-inl.h"

namespace h2o {
namespace {

constexpr int64_t kShortRow =
    128;  // numbers of a float's size; x and some rows of weights stay in the L1 cache

// Vectors of rows of x, and rows of weights, whose sums stay in registers.
constexpr int kShortVectors = kWidth == 16 ? 3 : kWidth == 8 ? 2 : 4;
constexpr int kShortColumns = 4;

// Rows of floats. For rows of other numbers, each of a float's size, m.x has their bits.
struct FloatRows {
  static Vec multiply_add(Vec a, Vec b, Vec sums) { return fma(a, b, sums); }
  template <class Type>
  static void read(float* to, const std::byte* row, int64_t n) {
    decode<Type>(to, row, n);
  }
};

template <int V>
struct ShortSums {
  Vec of[kShortColumns][V];
};

// The sums of elements `lane`, kWidth further, and so on.
template <class Rows, int V>
H2O_INLINE ShortSums<V> sums_of_lane(const float* w, const float* x, int64_t n_in, int64_t lane) {
  ShortSums<V> sums;
#pragma GCC unroll 8
  for (int j = 0; j < kShortColumns; ++j) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums.of[j][v] = zero();
  }
  for (int64_t k = lane; k < n_in; k += kWidth) {
    Vec rows[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) rows[v] = load(x + (k * V + v) * kWidth);
#pragma GCC unroll 8
    for (int j = 0; j < kShortColumns; ++j) {
      const Vec factor = broadcast(w[j * n_in + k]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        sums.of[j][v] = Rows::multiply_add(rows[v], factor, sums.of[j][v]);
      }
    }
  }
  return sums;
}

// Those of lanes [I, I + N), in kLaneOrder.
template <class Rows, int V, int64_t I, int64_t N>
H2O_INLINE ShortSums<V> sums_of_lanes(const float* w, const float* x, int64_t n_in) {
  if constexpr (N == 1) {
    return sums_of_lane<Rows, V>(w, x, n_in, kLaneOrder[I]);
  } else {
    ShortSums<V> sums = sums_of_lanes<Rows, V, I, N / 2>(w, x, n_in);
    const ShortSums<V> others = sums_of_lanes<Rows, V, I + N / 2, N / 2>(w, x, n_in);
#pragma GCC unroll 8
    for (int j = 0; j < kShortColumns; ++j) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums.of[j][v] = add(sums.of[j][v], others.of[j][v]);
    }
    return sums;
  }
}

// y [kShortColumns, V * kWidth] = w [kShortColumns, n_in] x [n_in, V * kWidth]
template <class Rows, int V>
void short_tile(float* y, const float* w, const float* x, int64_t n_in) {
  const ShortSums<V> sums = sums_of_lanes<Rows, V, 0, kWidth>(w, x, n_in);
  for (int j = 0; j < kShortColumns; ++j) {
    for (int v = 0; v < V; ++v) store(y + (j * V + v) * kWidth, sums.of[j][v]);
  }
}

// Multiplies up to V * kWidth rows of m.
template <class Type, class Rows, int V>
void short_rows(const Matmul& m, int64_t row, int64_t begin, int64_t end) {
  constexpr int64_t kRows = V * kWidth;
  alignas(64) float x[kShortRow * kRows];
  alignas(64) float w[kShortColumns * kShortRow];
  alignas(64) float sums[kWidth * kRows];
  const int64_t n_rows = m.n_rows - row < kRows ? m.n_rows - row : kRows;
  for (int64_t v = 0; v < kRows; v += kWidth) {
    for (int64_t k = 0; k < m.n_in; k += kWidth) {
      Vec block[kWidth];
      for (int64_t i = 0; i < kWidth; ++i) {
        block[i] = v + i < n_rows ? load(m.x + (row + v + i) * m.n_in + k) : zero();
      }
      transpose(block);
      for (int64_t i = 0; i < kWidth; ++i) store(x + (k + i) * kRows + v, block[i]);
    }
  }
  for (int64_t o = begin; o < end; o += kWidth) {
    const int64_t n = end - o < kWidth ? end - o : kWidth;
    for (int64_t j = 0; j < n; j += kShortColumns) {
      for (int64_t i = 0; i < kShortColumns; ++i) {
        const int64_t column = o + (j + i < n ? j + i : n - 1);
        Rows::template read<Type>(w + i * m.n_in, m.w + column * m.w_row_bytes, m.n_in);
      }
      short_tile<Rows, V>(sums + j * kRows, w, x, m.n_in);
    }
    for (int64_t v = 0; v < n_rows; v += kWidth) {
      Vec block[kWidth];
      for (int64_t j = 0; j < kWidth; ++j) block[j] = load(sums + j * kRows + v);
      transpose(block);
      for (int64_t i = 0; i < kWidth && v + i < n_rows; ++i) {
        float* y = m.y + (row + v + i) * m.y_stride + o;
        if (n == kWidth) {
          store(y, block[i]);
        } else {
          store_first(y, block[i], n);
        }
      }
    }
  }
}

// Takes as few vectors as hold the rows.
template <class Type, class Rows, int V>
void short_rows_of(const Matmul& m, int64_t row, int64_t begin, int64_t end) {
  if constexpr (V > 1) {
    if (m.n_rows - row <= (V - 1) * kWidth)
      return short_rows_of<Type, Rows, V - 1>(m, row, begin, end);
  }
  short_rows<Type, Rows, V>(m, row, begin, end);
}

inline bool has_short_rows(const Matmul& m) {
  return m.n_in <= kShortRow && m.n_in % kWidth == 0 && m.n_rows >= kWidth && m.bias == nullptr &&
         !m.add;
}

template <class Type, class Rows = FloatRows>
void short_matmul(const Matmul& m, int64_t begin, int64_t end) {
  for (int64_t row = 0; row < m.n_rows; row += kShortVectors * kWidth) {
    short_rows_of<Type, Rows, kShortVectors>(m, row, begin, end);
  }
}

}  // namespace
}  // namespace h2o
