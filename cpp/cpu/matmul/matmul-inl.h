// Matmul with x in float for all weight types (see cpu/kernels-inl.h).
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/blocks-inl.h"
#include "cpu/matmul/short_rows-inl.h"
#include "cpu/matmul/terms-inl.h"

namespace h2o {
namespace {

// Outputs [R rows from r] x [O columns from o]. Each has one accumulator over n_in, so its value
// does not depend on R and O. Prefetches weights `ahead` bytes further on.
template <class Type, int R, int O>
void matmul_tile(const Matmul& m, int64_t r, int64_t o, const Terms& terms, int64_t ahead = 0) {
  const float* x[R];
  const std::byte* w[O];
  constexpr int kSums = (O + 3) / 4 * 4;  // stored four at a time
  Vec sums[R][O];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) x[i] = m.x + (r + i) * m.n_in;
#pragma GCC unroll 8
  for (int j = 0; j < O; ++j) w[j] = m.w + (o + j) * m.w_row_bytes;
  begin_sums(sums, terms);

  // Unrolled here: otherwise GCC 12 stores all sums to memory in every step.
  int64_t k = terms.begin;
  for (; k + Type::kBlock <= terms.end; k += Type::kBlock) {
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
    if (k < terms.end) {
#pragma GCC unroll 8
      for (int j = 0; j < O; ++j) {
        const Vec wv = Type::tail(w[j], k, terms.end - k);
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
          sums[i][j] = fma(load_first(x[i] + k, terms.end - k), wv, sums[i][j]);
        }
      }
    }
  }
  if (terms.end < m.n_in) return keep_sums(sums, terms);

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

// Computes n <= R rows.
template <class Type, int R, int O>
void matmul_tile_of(int64_t n, const Matmul& m, int64_t r, int64_t o, const Terms& terms) {
  if constexpr (R > 1) {
    if (n < R) return matmul_tile_of<Type, R - 1, O>(n, m, r, o, terms);
  }
  // Hardware prefetchers stop at the end of a page, which short rows reach soon.
  const int64_t ahead = m.n_in <= kShortRow ? kShortRowsAhead * m.w_row_bytes : 0;
  matmul_tile<Type, R, O>(m, r, o, terms, ahead);
}

// Columns [begin, end), at most kCachedColumns. A part of a tile's rows of x stays in the L1 cache
// while iterating over columns, which stay in the L2 cache while iterating over tiles.
constexpr int64_t kCachedColumns = 16 * kTileColumns;
constexpr int64_t kCachedTerms = 1536;

template <class Type>
void matmul_columns(const Matmul& m, int64_t begin, int64_t end) {
  Vec kept[kTileRows * kCachedColumns];
  // Weights for one tile are read once: as they are in memory.
  const int64_t part = m.n_rows <= kTileRows ? m.n_in : part_size(m.n_in, kCachedTerms);
  for (int64_t r = 0; r < m.n_rows; r += kTileRows) {
    for (int64_t k = 0; k < m.n_in; k += part) {
      Terms terms{k, m.n_in - k < part ? m.n_in : k + part, kept};
      int64_t o = begin;
      for (; o + kTileColumns <= end; o += kTileColumns, terms.kept += kTileRows * kTileColumns) {
        matmul_tile_of<Type, kTileRows, kTileColumns>(m.n_rows - r, m, r, o, terms);
      }
      for (; o < end; ++o, terms.kept += kTileRows) {
        matmul_tile_of<Type, kTileRows, 1>(m.n_rows - r, m, r, o, terms);
      }
    }
  }
}

// The same, with weights converted to float once: for narrow vectors, converting them for each tile
// would take a fifth of the time or more.
template <class Type>
void converted_columns(const Matmul& m, int64_t begin, int64_t end) {
  const int64_t n_fitting = kMatmulWorkspace / m.n_in / kTileColumns * kTileColumns;
  for (int64_t o = begin; o < end; o += n_fitting) {
    const int64_t n = end - o < n_fitting ? end - o : n_fitting;
    for (int64_t j = 0; j < n; ++j) {
      decode<Type>(m.workspace + j * m.n_in, m.w + (o + j) * m.w_row_bytes, m.n_in);
    }
    Matmul some = m;
    some.w = reinterpret_cast<const std::byte*>(m.workspace);
    some.w_row_bytes = m.n_in * static_cast<int64_t>(sizeof(float));
    some.y += o;
    if (m.bias != nullptr) some.bias += o;
    matmul_columns<Plain<float>>(some, 0, n);
  }
}

template <class Type>
void matmul(const Matmul& m, int64_t begin, int64_t end) {
  if (m.n_rows == 1) {  // many columns at once hide the latency of fma
    const Terms all{0, m.n_in, nullptr};
    int64_t o = begin;
    for (; o + 8 <= end; o += 8) {
      matmul_tile<Type, 1, 8>(m, 0, o, all, o + 16 <= end ? 8 * m.w_row_bytes : 0);
    }
    for (; o + 4 <= end; o += 4) matmul_tile<Type, 1, 4>(m, 0, o, all);
    for (; o < end; ++o) matmul_tile<Type, 1, 1>(m, 0, o, all);
    return;
  }
  if constexpr (kWidth > 1) {
    if (has_short_rows(m)) return short_matmul<Type>(m, begin, end);
  }
  for (int64_t o = begin; o < end; o += kCachedColumns) {
    const int64_t last = end - o < kCachedColumns ? end : o + kCachedColumns;
    if constexpr (kWidth <= 4 && Type::kBlock == kWidth) {
      if (m.workspace != nullptr && m.n_rows > kTileRows &&
          m.n_in * kTileColumns <= kMatmulWorkspace) {
        converted_columns<Type>(m, o, last);
        continue;
      }
    }
    matmul_columns<Type>(m, o, last);
  }
}

}  // namespace
}  // namespace h2o
