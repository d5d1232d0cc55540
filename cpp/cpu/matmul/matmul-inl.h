// Matmul with x in float for all weight types (see cpu/kernels-inl.h).
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/blocks-inl.h"
#include "cpu/matmul/short_rows-inl.h"

namespace h2o {
namespace {

// Outputs [R rows from r] x [O columns from o]. Each has one accumulator over n_in, so its value
// does not depend on R and O. Prefetches weights `ahead` bytes further on.
template <class Type, int R, int O>
void matmul_tile(const Matmul& m, int64_t r, int64_t o, int64_t ahead = 0) {
  const float* x[R];
  const std::byte* w[O];
  constexpr int kSums = (O + 3) / 4 * 4;  // stored four at a time
  Vec sums[R][O];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) x[i] = m.x + (r + i) * m.n_in;
#pragma GCC unroll 8
  for (int j = 0; j < O; ++j) w[j] = m.w + (o + j) * m.w_row_bytes;
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < O; ++j) sums[i][j] = zero();
  }

  // Unrolled here: otherwise GCC 12 stores all sums to memory in every step.
  int64_t k = 0;
  for (; k + Type::kBlock <= m.n_in; k += Type::kBlock) {
#pragma GCC unroll 8
    for (int j = 0; j < O; ++j) {
      const Type block = Type::block(w[j], k);
      if constexpr (R < kTileRows) block.prefetch(ahead);
      for (int64_t g = 0; g < Type::kBlock; g += Type::kGroup) {
        const auto group = block.group(g);
        for (int64_t l = 0; l < Type::kGroup; l += kWidth) {
          const Vec wv = group.at(l);
#pragma GCC unroll 8
          for (int i = 0; i < R; ++i) sums[i][j] = fma(load(x[i] + k + g + l), wv, sums[i][j]);
        }
      }
    }
  }
  if constexpr (Type::kBlock == kWidth) {
    if (k < m.n_in) {
#pragma GCC unroll 8
      for (int j = 0; j < O; ++j) {
        const Vec wv = Type::tail(w[j], k, m.n_in - k);
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
          sums[i][j] = fma(load_first(x[i] + k, m.n_in - k), wv, sums[i][j]);
        }
      }
    }
  }

  const bool plain = m.bias == nullptr && !m.add;
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
    float* y = m.y + (r + i) * m.y_stride + o;
    float values[kSums];
#pragma GCC unroll 2
    for (int j = 0; j < kSums; j += 4) {
      const auto at = [&](int l) { return sums[i][l < O ? l : O - 1]; };
      store_sums(O == kSums && plain ? y + j : values + j, at(j), at(j + 1), at(j + 2), at(j + 3));
    }
    if (O == kSums && plain) continue;
    for (int j = 0; j < O; ++j) {
      const float value = m.bias != nullptr ? values[j] + m.bias[o + j] : values[j];
      y[j] = m.add ? y[j] + value : value;
    }
  }
}

constexpr int64_t kShortRowsAhead = 24;

// The same for n <= R rows.
template <class Type, int R, int O>
void matmul_tile_of(int64_t n, const Matmul& m, int64_t r, int64_t o) {
  if constexpr (R > 1) {
    if (n < R) return matmul_tile_of<Type, R - 1, O>(n, m, r, o);
  }
  // Hardware prefetchers stop at the end of a page, which short rows reach soon.
  const int64_t ahead = m.n_in <= kShortRow ? kShortRowsAhead * m.w_row_bytes : 0;
  matmul_tile<Type, R, O>(m, r, o, ahead);
}

// The part of x that stays in the L2 cache while iterating over columns.
constexpr int64_t kCachedFloats = 192 * 1024;

// O columns of the rows [first, last).
template <class Type, int O>
void matmul_rows(const Matmul& m, int64_t first, int64_t last, int64_t o) {
  for (int64_t r = first; r < last; r += kTileRows) {
    matmul_tile_of<Type, kTileRows, O>(last - r, m, r, o);
  }
}

// The same. If the workspace allows, weights for several tiles are first converted to float: f16 is
// converted once, and rows of 4096 bytes do not map to the same cache lines.
template <class Type, int O>
void matmul_columns(const Matmul& m, int64_t first, int64_t last, int64_t o) {
  if constexpr (Type::kBlock == kWidth) {
    const int64_t stride = m.n_in + 64 / static_cast<int64_t>(sizeof(float));
    if (m.workspace != nullptr && last - first > kTileRows && O * stride <= kMatmulWorkspace) {
      for (int64_t j = 0; j < O; ++j) {
        decode<Type>(m.workspace + j * stride, m.w + (o + j) * m.w_row_bytes, m.n_in);
      }
      Matmul gathered = m;
      gathered.w = reinterpret_cast<const std::byte*>(m.workspace);
      gathered.w_row_bytes = stride * static_cast<int64_t>(sizeof(float));
      gathered.y += o;
      if (m.bias != nullptr) gathered.bias += o;
      return matmul_rows<Plain<float>, O>(gathered, first, last, 0);
    }
  }
  matmul_rows<Type, O>(m, first, last, o);
}

template <class Type>
void matmul(const Matmul& m, int64_t begin, int64_t end) {
  if (m.n_rows == 1) {  // many columns at once hide the latency of fma
    int64_t o = begin;
    for (; o + 8 <= end; o += 8) {
      matmul_tile<Type, 1, 8>(m, 0, o, o + 16 <= end ? 8 * m.w_row_bytes : 0);
    }
    for (; o + 4 <= end; o += 4) matmul_tile<Type, 1, 4>(m, 0, o);
    for (; o < end; ++o) matmul_tile<Type, 1, 1>(m, 0, o);
    return;
  }
  if constexpr (kWidth > 1) {
    if (has_short_rows(m)) return short_matmul<Type>(m, begin, end);
  }
  const int64_t n_tiles = kCachedFloats / (m.n_in * kTileRows);
  const int64_t n_cached = (n_tiles > 1 ? n_tiles : 1) * kTileRows;
  for (int64_t first = 0; first < m.n_rows; first += n_cached) {
    const int64_t last = m.n_rows - first < n_cached ? m.n_rows : first + n_cached;
    int64_t o = begin;
    for (; o + kTileColumns <= end; o += kTileColumns) {
      matmul_columns<Type, kTileColumns>(m, first, last, o);
    }
    for (; o < end; ++o) matmul_columns<Type, 1>(m, first, last, o);
  }
}

}  // namespace
}  // namespace h2o
