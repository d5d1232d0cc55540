// Panels of quantized weights, unpacked to bytes, compiled once per instruction set (see
// cpu/kernels-inl.h).
//
// kWidth columns are interleaved, four bytes each: for every four elements, those of all columns.
//
// Requires from vec_*.h, in addition to kernels-inl.h and int8_row-inl.h: kTileVectors.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/int8_interleaved-inl.h"
#include "cpu/matmul/int8_rows-inl.h"

namespace h2o {
namespace {

constexpr int64_t kColumns = kTileVectors * kWidth;  // per panel

static_assert(kColumns <= kInt8Columns && kColumns % kInterleaved == 0);

// kInt8Depth elements of kColumns columns.
struct Panel {
  static constexpr int64_t kScales = kInt8Depth / kInt8Group * kColumns;

  int8_t* q;             // [depth / 4, kColumns, 4]
  float *scales, *mins;  // [depth / group, kColumns]
  float* sums;           // [n_rows, kColumns]: sums over the previous panels of these columns

  explicit Panel(std::byte* workspace)
      : q(reinterpret_cast<int8_t*>(workspace)),
        scales(reinterpret_cast<float*>(q + kInt8Depth * kColumns)),
        mins(scales + kScales),
        sums(mins + kScales) {}
};

// kWidth columns from `begin`. Columns past `end` repeat the last one; their sums are unused.
struct ColumnTable {
  const std::byte* rows[kWidth];

  ColumnTable(const Matmul& m, int64_t begin, int64_t end, int64_t at) {
    for (int64_t i = 0; i < kWidth; ++i) {
      rows[i] = m.w + (begin + i < end ? begin + i : end - 1) * m.w_row_bytes + at;
    }
  }
  const std::byte* column(int64_t i) const { return rows[i]; }
  Columns vector(int64_t i) const {
    return {rows[i], rows[(i + kQuantVectors) % kWidth] - rows[i]};
  }
};

// Elements [k, k + n) of the columns from `begin`.
template <class Type>
void pack(const Panel& panel, const Matmul& m, int64_t begin, int64_t end, int64_t k, int64_t n) {
  constexpr int64_t kBlockBytes = sizeof(typename Type::Block);
  const int64_t ahead = begin + 2 * kColumns <= end ? kColumns * m.w_row_bytes : 0;
  for (int64_t v = 0; v < kColumns; v += kWidth) {
    const ColumnTable columns(m, begin + v, end, k / Type::kBlock * kBlockBytes);
    read_scales<Type>(panel.scales + v, panel.mins + v, kColumns, columns, n);
    for (int64_t i = 0; i < n; i += Type::kBlock) {
      const int64_t at = i / Type::kBlock * kBlockBytes;
      // Unrolling would double the size of all these kernels, and gains little.
#pragma GCC unroll 1
      for (int g = 0; g < Type::kBlock; g += 32) {
        // Software prefetch: hardware prefetchers do not detect the next columns in time, and the
        // number of outstanding lines is limited.
        const int64_t next = at + ahead + g * kBlockBytes / Type::kBlock;
        Quants q[kQuantVectors];
#pragma GCC unroll 8
        for (int64_t j = 0; j < kQuantVectors; ++j) {
          for (int64_t c = 0; c < kQuantColumns; ++c) {
            __builtin_prefetch(columns.vector(j)[c] + next, 0, 2);
          }
          Type::quants(q + j, BlocksInRows{columns.vector(j), at}, g);
        }
        transpose_quads(panel.q + (i + g) * kColumns + v * kQuad, kColumns * kQuad, q);
      }
    }
  }
}

// Elements [g, g + 32) of a block as bytes: quads of kInterleaved columns.
template <class Type>
H2O_INLINE void unpack_quads(int8_t* to, int64_t stride, const std::byte* block, int g) {
#pragma GCC unroll 8
  for (int e = 0; e < 32; e += kQuad) {
#pragma GCC unroll 2
    for (int64_t at = 0; at < kInterleaved * kQuad; at += static_cast<int64_t>(sizeof(Quants))) {
      Quants q;
      Type::quants(&q, InterleavedBlocks<typename Type::Block>{block + at, e}, g);
      __builtin_memcpy(to + e / kQuad * stride + at, &q, sizeof(q));
    }
  }
}

// Packs kInterleaved interleaved columns: bytes are already in order, and only need
// unpacking.
template <class Type>
void pack_interleaved(const Panel& panel, const Matmul& m, int64_t begin, int64_t end, int64_t k,
                      int64_t n) {
  constexpr int64_t kBlockBytes = kInterleaved * sizeof(typename Type::Block);
  // The next elements of these columns, or the first of the next columns.
  int64_t ahead = n / Type::kBlock * kBlockBytes;
  if (k + n == m.n_in) {
    const bool is_last = begin + 2 * kColumns > end;
    ahead = is_last ? 0 : kColumns * m.w_row_bytes - k / Type::kBlock * kBlockBytes;
  }
  for (int64_t v = 0; v < kColumns && begin + v < end; v += kInterleaved) {
    const std::byte* block = m.w + (begin + v) * m.w_row_bytes + k / Type::kBlock * kBlockBytes;
    for (int64_t i = 0; i < n; i += Type::kBlock, block += kBlockBytes) {
#pragma GCC unroll 8
      for (int g = 0; g < Type::kBlock; g += 32) {
        prefetch_lines<kBlockBytes * 32 / Type::kBlock>(block + ahead +
                                                        g * kBlockBytes / Type::kBlock);
        unpack_quads<Type>(panel.q + (i + g) * kColumns + v * kQuad, kColumns * kQuad, block, g);
      }
      for (int64_t column = 0; column < kInterleaved; column += kWidth) {
        const BlockScales<Type> scales(block, column);
        constexpr int64_t kGroups = Type::kBlock / Type::kGroup;
        Vec of_groups[kGroups], mins[kGroups];  // before one is stored, which might be what is read
#pragma GCC unroll 16
        for (int64_t g = 0; g < kGroups; ++g) {
          of_groups[g] = scales.scale(g);
          if constexpr (Type::kMins) mins[g] = scales.min(g);
        }
        const int64_t to = i / Type::kGroup * kColumns + v + column;
#pragma GCC unroll 16
        for (int64_t g = 0; g < kGroups; ++g) {
          store(panel.scales + to + g * kColumns, of_groups[g]);
          if constexpr (Type::kMins) store(panel.mins + to + g * kColumns, mins[g]);
        }
      }
    }
  }
}

// The rows of x from r, at elements from k on; `n_rows`: of the tile that starts at r.
template <class Type>
H2O_INLINE Int8Rows rows_from(const Int8Rows& x, int64_t r, int64_t n_rows, int64_t k) {
  const int64_t at = r * x.n_in + k * n_rows;
  Int8Rows from = x;
  from.q += at;
  from.scales += at / kActivations;
  from.sums += at / Type::kGroup;
  return from;
}

// Columns [begin, end) of a product, panel by panel and tile by tile. multiply(panel, x, sums,
// n_rows, n, first) adds the products of the panel's n elements with a tile, whose x starts at the
// panel's elements, to the tile's sums [n_rows, kColumns]; `first`: there are none yet.
template <class Type, bool kIsInterleaved, class Tile, class Multiply>
H2O_INLINE void multiply_panels(const Matmul& m, const Int8Rows& x, int64_t begin, int64_t end,
                                std::byte* workspace, const Multiply& multiply) {
  const Panel panel(workspace);
  for (int64_t o = begin; o < end; o += kColumns) {
    const int64_t n_columns = end - o < kColumns ? end - o : kColumns;
    for (int64_t k = 0; k < m.n_in; k += kInt8Depth) {
      const int64_t n = m.n_in - k < kInt8Depth ? m.n_in - k : kInt8Depth;
      if constexpr (kIsInterleaved) {
        pack_interleaved<Type>(panel, m, o, end, k, n);
      } else {
        pack<Type>(panel, m, o, end, k, n);
      }
      const bool is_last = k + n == m.n_in;
      for (int64_t r = 0; r < m.n_rows; r += Tile::kRows) {
        const Tile tile(r, m.n_rows);
        for (int64_t i = r; is_last && i < r + tile.n; ++i) {
          prefetch_to_write<kColumns * 4>(m.y + i * m.y_stride + o);
        }
        float* sums = panel.sums + r * kColumns;
        multiply(panel, rows_from<Type>(x, r, tile.n, k), sums, tile.n, n, k == 0);
        for (int64_t i = 0; is_last && i < tile.n; ++i) {
          write_outputs(m, r + i, o, n_columns, sums + i * kColumns);
        }
      }
    }
  }
}

}  // namespace
}  // namespace h2o
