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
// Requires from vec_*.h, in addition to kernels-inl.h and int8_row-inl.h: kTileRows, kTileVectors;
// load_quads and broadcast_quad of four bytes per lane; store_bytes.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/int8_interleaved-inl.h"

namespace h2o {
namespace {

constexpr int64_t kColumns = kTileVectors * kWidth;  // per panel

static_assert(kColumns <= kInt8Columns && kColumns % kInterleaved == 0);

// ---- Activations ----

// Rows are stored in tiles, in the order that the kernel reads them: for every four elements, those
// of all rows of the tile. The last tile has the remaining rows.
struct RowTile {
  int64_t begin;
  int64_t n;

  RowTile(int64_t row, int64_t n_rows) : begin(row / kTileRows * kTileRows) {
    n = n_rows - begin < kTileRows ? n_rows - begin : kTileRows;
  }
};

Vec magnitude(Vec x) { return max(x, sub(zero(), x)); }

// Rounds as encode_q8_0 does, but with the scale in float. A scale of NaN marks a row that is not
// finite. Computes the largest magnitudes of several blocks first, so that blocks do not wait for
// each other's divisions.
template <int64_t kGroup>
void quantize_rows_in_groups(const Int8Rows& to, const float* x, int64_t begin, int64_t end) {
  constexpr int64_t kTogether = 16;
  const int64_t n_blocks = to.n_in / kActivations;
  for (int64_t r = begin; r < end; ++r) {
    const RowTile tile(r, to.n_rows);
    int8_t* q_to = to.q + tile.begin * to.n_in + (r - tile.begin) * kQuad;
    float* const scales = to.scales + tile.begin * n_blocks + (r - tile.begin);
    int32_t* sums = to.sums + tile.begin * to.n_in / kGroup + (r - tile.begin);
    const float* from = x + r * to.n_in;
    Vec nothing = zero();  // or NaN
    for (int64_t first = 0; first < n_blocks; first += kTogether) {
      const int64_t n = n_blocks - first < kTogether ? n_blocks - first : kTogether;
      float d[kTogether], inverse[kTogether];
      for (int64_t b = 0; b < n; ++b) {
        Vec largest = zero();
        for (int64_t i = b * kActivations; i < (b + 1) * kActivations; i += kWidth) {
          const Vec v = load(from + i);
          largest = max(largest, magnitude(v));
          nothing = fma(v, zero(), nothing);
        }
        d[b] = maximum(largest);
      }
      for (int64_t b = 0; b < n; ++b) {
        d[b] /= 127;
        // For denormal d, 1 / d may overflow: such values are rounded to zero.
        inverse[b] = d[b] >= 0x1p-126f ? 1 / d[b] : 0;
        scales[(first + b) * tile.n] = d[b];
      }
      for (int64_t b = 0; b < n; ++b, from += kActivations) {
        int8_t q[kActivations];
        for (int64_t g = 0; g < kActivations; g += kGroup, sums += tile.n) {
          Vec total = zero();  // of integers below 2^12, so exact
          for (int64_t i = g; i < g + kGroup; i += kWidth) {
            const Vec nearest = round(mul(load(from + i), broadcast(inverse[b])));
            const Vec value = min(max(nearest, broadcast(-127)), broadcast(127));  // NaN: -127
            store_bytes(q + i, value);
            total = add(total, value);
          }
          *sums = static_cast<int32_t>(sum(total));
        }
        for (int64_t i = 0; i < kActivations; i += kQuad, q_to += kQuad * tile.n) {
          __builtin_memcpy(q_to, q + i, kQuad);
        }
      }
    }
    const float nan = sum(nothing);
    for (int64_t b = 0; nan != 0 && b < n_blocks; ++b) scales[b * tile.n] = nan;
  }
}

void quantize_rows(const Int8Rows& to, const float* x, int64_t begin, int64_t end) {
  if (to.group == kActivations) return quantize_rows_in_groups<kActivations>(to, x, begin, end);
  quantize_rows_in_groups<kInt8Group>(to, x, begin, end);
}

// ---- Weights ----

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

// The same for kInterleaved interleaved columns: bytes are already in order, and only need
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
  const Panel panel(workspace);
  for (int64_t o = begin; o < end; o += kColumns) {
    for (int64_t k = 0; k < m.n_in; k += kInt8Depth) {
      const int64_t n = m.n_in - k < kInt8Depth ? m.n_in - k : kInt8Depth;
      if constexpr (kIsInterleaved) {
        pack_interleaved<Type>(panel, m, o, end, k, n);
      } else {
        pack<Type>(panel, m, o, end, k, n);
      }
      for (int64_t r = 0; r < m.n_rows; r += kTileRows) {
        const RowTile tile(r, m.n_rows);
        Int8Rows from = x;
        from.q += r * m.n_in + k * tile.n;
        from.scales += (r * m.n_in + k * tile.n) / kActivations;
        from.sums += (r * m.n_in + k * tile.n) / Type::kGroup;
        int8_tile_of<Type, kTileRows>(tile.n, panel, from, panel.sums + r * kColumns, n, k == 0);
      }
    }
    for (int64_t r = 0; r < m.n_rows; ++r) {
      write_outputs(m, r, o, end - o < kColumns ? end - o : kColumns, panel.sums + r * kColumns);
    }
  }
}

}  // namespace
}  // namespace h2o
