// Matmul of F16 and BF16 weights in bf16 with AMX (see cpu/kernels-inl.h).
//
// A tile register has 16 rows of 64 bytes. An instruction adds the products of 32 elements to 16
// columns of outputs, for up to 16 rows of x: as two sums, over even and odd elements, whose sum is
// added. An output is thus one sum over steps of 32 elements in order, bit-identical for every
// batch and range of columns.
//
// A panel of columns is copied, rounded from f16 if necessary, so that its tiles are contiguous in
// the L1 cache; then all rows of x are multiplied with it. Sums are kept between panels of the same
// columns.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/amx_tiles.h"
#include "cpu/matmul/bf16_avx512.h"
// After the vector type it is written against:
#include "cpu/matmul/blocks-inl.h"

namespace h2o {
namespace {

constexpr int64_t kTileBytes = kTile * kTileRow;
constexpr int64_t kStep = kPairWidth;  // elements of each row per instruction

// Two tiles of columns, which stay in the L1 cache while iterating over rows of x.
constexpr int64_t kPanelColumns = 2 * kTile;
constexpr int64_t kPanelDepth = 512;
constexpr int64_t kPanelBytes = kPanelColumns * kPanelDepth * 2;

// Panels whose sums are kept at a time: a part of x is read from the L2 cache for all of them.
constexpr int64_t kPanels = 8;
constexpr int64_t kPanelSums = kRoundedRows * kPanelColumns;

static_assert(kPanelBytes + kPanels * kPanelSums * 4 <= kBf16Workspace);

// ---- Activations ----

// Rows are stored in tiles: for every two elements, those of all rows of the tile. All tiles of
// kPanelDepth elements are contiguous.
struct RowTiles {
  int64_t width;   // rows per tile; the last one is zero-padded
  int64_t n_rows;  // in all tiles
  int64_t n_in;

  explicit RowTiles(const Bf16Rows& x)
      : width(x.n_rows < kTile ? x.n_rows : kTile),
        n_rows(padded_to(x.n_rows, width)),
        n_in(padded_to(x.n_in, kStep)) {}

  int64_t depth(int64_t k) const { return n_in - k < kPanelDepth ? n_in - k : kPanelDepth; }

  // Offset of the tile of row r for elements k and up, a multiple of kPanelDepth.
  int64_t at(int64_t r, int64_t k) const { return k * n_rows + r * depth(k); }
};

// kStep elements of a row from x, rounded; zeros from n on.
Pairs round_step(const float* x, int64_t n) {
  return n >= kStep ? load_pairs(x) : load_first_pairs(x, n > 0 ? n : 0);
}

// One step of a whole tile of rows, of which n_rows exist.
void round_tile(BF16* to, const float* x, int64_t n_rows, int64_t stride, int64_t n) {
  const auto row = [&](int64_t i) {
    return (__m512i)round_step(x + i * stride, i < n_rows ? n : 0).v;
  };
  Quants q[2][kTile / 2];
#pragma GCC unroll 8
  for (int64_t i = 0; i < kTile / 2; ++i) {
    const __m512i a = row(i), b = row(i + kTile / 2);
    q[0][i] = (Quants)_mm512_shuffle_i64x2(a, b, 0x44);  // the lower halves
    q[1][i] = (Quants)_mm512_shuffle_i64x2(a, b, 0xee);
  }
  int8_t* tile = reinterpret_cast<int8_t*>(to);
  transpose_quads(tile, kTileRow, q[0]);
  transpose_quads(tile + kTileBytes / 2, kTileRow, q[1]);
}

void round_rows(const Bf16Rows& to, const float* x, int64_t begin, int64_t end) {
  const RowTiles tiles(to);
  for (int64_t r = begin; r < end; r += tiles.width) {
    for (int64_t k = 0; k < tiles.n_in; k += kStep) {
      const int64_t panel = k / kPanelDepth * kPanelDepth;
      BF16* tile = to.x + tiles.at(r, panel) + (k - panel) * tiles.width;
      const float* from = x + r * to.n_in + k;
      if (tiles.width == kTile) {
        round_tile(tile, from, to.n_rows - r, to.n_in, to.n_in - k);
        continue;
      }
      for (int64_t i = 0; i < tiles.width; ++i) {
        BF16 pairs[kStep];
        store_pairs(pairs, round_step(from + i * to.n_in, to.n_in - k));
        for (int64_t j = 0; j < kStep; j += 2) {
          __builtin_memcpy(tile + j * tiles.width + i * 2, pairs + j, 4);
        }
      }
    }
  }
}

// ---- Weights ----

// A part of the weights: up to kPanelColumns columns from o, up to kPanelDepth elements from k.
struct Part {
  int64_t o, k;
};

// Location of a part in the file, and the number of its columns within [.., end).
struct Source {
  const std::byte* w;
  int64_t n_columns;
  int64_t row_bytes;

  Source(const Matmul& m, Part part, int64_t end)
      : w(m.w + part.o * m.w_row_bytes + part.k * 2),
        n_columns(end - part.o < kPanelColumns ? end - part.o : kPanelColumns),
        row_bytes(m.w_row_bytes) {}

  const std::byte* column(int64_t j) const { return w + j * row_bytes; }
};

// Packs n elements of C columns into tiles. Missing elements are zero; missing columns repeat the
// last one and their sums are unused.
template <class T, int64_t C>
void pack(std::byte* panel, const Source& from, int64_t n) {
  for (int64_t j = 0; j < C; ++j) {
    const T* w =
        reinterpret_cast<const T*>(from.column(j < from.n_columns ? j : from.n_columns - 1));
    BF16* to = reinterpret_cast<BF16*>(panel + j * kTileRow);
    int64_t k = 0;
    for (; k + kStep <= n; k += kStep) store_pairs(to + k * C, load_pairs(w + k));
    if (k < n) store_pairs(to + k * C, load_first_pairs(w + k, n - k));
  }
}

// ---- Products ----

// Tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 rows of x.
void configure_tiles(int64_t width) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.set(i, kTile, i == 4 || i == 5 ? kTileRow : 4 * width);
  config.load();
}

// Software prefetch of a part while another is multiplied: for some columns, one element of each
// step.
struct Ahead {
  const std::byte* w;
  int64_t n_columns;
  int64_t row_bytes;
};

// Adds the products of a panel with R tiles of rows to their sums; `first`: there are no sums yet.
template <int R>
void amx_tiles(float* sums, const std::byte* w, const BF16* x, int64_t depth, int64_t width,
               bool first, const Ahead& ahead) {
  constexpr int64_t kSums = kTile * kTile;
  const int64_t x_row = 4 * width;
  const BF16* x_next = x + depth * width;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (R == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, kTileRow);
    _tile_loadd(1, sums + kSums, kTileRow);
    if constexpr (R == 2) {
      _tile_loadd(2, sums + 2 * kSums, kTileRow);
      _tile_loadd(3, sums + 3 * kSums, kTileRow);
    }
  }
  for (int64_t k = 0; k < depth; k += kStep) {
    for (int64_t j = 0; j < ahead.n_columns; ++j) {
      __builtin_prefetch(ahead.w + j * ahead.row_bytes + k * 2, 0, 2);
    }
    _tile_loadd(4, w, kTileRow);
    _tile_stream_loadd(6, x, x_row);  // streaming: need not stay in cache
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, w + kTileBytes, kTileRow);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (R == 2) {
      _tile_stream_loadd(7, x_next, x_row);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    w += 2 * kTileBytes;
    x += kStep * width;
    x_next += kStep * width;
  }
  _tile_stored(0, sums, kTileRow);
  _tile_stored(1, sums + kSums, kTileRow);
  if constexpr (R == 2) {
    _tile_stored(2, sums + 2 * kSums, kTileRow);
    _tile_stored(3, sums + 3 * kSums, kTileRow);
  }
}

// Outputs of rows [r, r + n_rows) and columns [o, o + n_columns), at most a tile.
void write_tile(const Matmul& m, const float* sums, int64_t r, int64_t n_rows, int64_t o,
                int64_t n_columns) {
  const auto mask = static_cast<__mmask16>((1u << n_columns) - 1);
  const __m512 bias =
      m.bias != nullptr ? _mm512_maskz_loadu_ps(mask, m.bias + o) : _mm512_setzero_ps();
  Vec of_rows[kTile];
#pragma GCC unroll 16
  for (int64_t j = 0; j < kTile; ++j) of_rows[j] = load(sums + j * kTile);
  transpose(of_rows);
  for (int64_t i = 0; i < n_rows; ++i) {
    float* y = m.y + (r + i) * m.y_stride + o;
    __m512 value = of_rows[i].v;
    if (m.bias != nullptr) value = _mm512_add_ps(value, bias);
    if (m.add) value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), value);
    _mm512_mask_storeu_ps(y, mask, value);
  }
}

// Adds the products of one step of a column tile and a row tile.
void amx_step(const std::byte* w, int64_t w_row, const BF16* x, int64_t width) {
  _tile_loadd(4, w, w_row);
  _tile_loadd(6, x, 4 * width);
  _tile_dpbf16ps(0, 4, 6);
}

// At most one tile of rows. Bound by reading the weights, so they are not packed into panels: bf16
// weights are read in place where a tile of them is complete.
template <class T>
void amx_few_rows(const Matmul& m, const Bf16Rows& rows, int64_t begin, int64_t end,
                  std::byte* workspace) {
  constexpr int64_t kRun = 2 * kStep;  // two cache lines of each column
  float* sums = reinterpret_cast<float*>(workspace + kPanelBytes);
  for (int64_t o = begin; o < end; o += kTile) {
    const int64_t n_columns = end - o < kTile ? end - o : kTile;
    const int64_t whole = n_columns == kTile ? m.n_in / kRun * kRun : 0;
    const int64_t ahead = o + 2 * kTile <= end ? kTile * m.w_row_bytes : 0;
    _tile_zero(0);
    int64_t k = 0;
    for (; k < whole; k += kRun) {
      const Source from(m, {o, k}, end);
      for (int64_t j = 0; j < kTile; ++j) {
        __builtin_prefetch(from.column(j) + ahead, 0, 2);
        __builtin_prefetch(from.column(j) + ahead + kTileRow, 0, 2);
        if constexpr (!__is_same(T, BF16)) {
          const T* w = reinterpret_cast<const T*>(from.column(j));
          BF16* to = reinterpret_cast<BF16*>(workspace + j * kTileRow);
          store_pairs(to, load_pairs(w));
          store_pairs(to + kTileBytes / 2, load_pairs(w + kStep));
        }
      }
      written_before();
      const BF16* x = rows.x + k * m.n_rows;
      if constexpr (__is_same(T, BF16)) {
        amx_step(from.w, m.w_row_bytes, x, m.n_rows);
        amx_step(from.w + kTileRow, m.w_row_bytes, x + kStep * m.n_rows, m.n_rows);
      } else {
        amx_step(workspace, kTileRow, x, m.n_rows);
        amx_step(workspace + kTileBytes, kTileRow, x + kStep * m.n_rows, m.n_rows);
      }
    }
    for (; k < m.n_in; k += kStep) {
      pack<T, kTile>(workspace, {m, {o, k}, end}, m.n_in - k < kStep ? m.n_in - k : kStep);
      written_before();
      amx_step(workspace, kTileRow, rows.x + k * m.n_rows, m.n_rows);
    }
    _tile_stored(0, sums, kTileRow);
    write_tile(m, sums, 0, m.n_rows, o, n_columns);
  }
}

template <class T>
void amx_matmul(const Matmul& m, const Bf16Rows& x, int64_t begin, int64_t end,
                std::byte* workspace) {
  const RowTiles tiles(x);
  std::byte* panel = workspace;
  float* all_sums = reinterpret_cast<float*>(workspace + kPanelBytes);
  const int64_t rows_at_once = 2 * tiles.width;
  const int64_t n_passes = (tiles.n_rows + rows_at_once - 1) / rows_at_once;
  // Prefetch weights while others are multiplied.
  const int64_t ahead_per_pass = (kPanelColumns + n_passes - 1) / n_passes;
  const int64_t group = kPanels * kPanelColumns;

  const auto multiply = [&](Part part, float* sums, Part next) {
    const Source from(m, part, end);
    const Source after(m, next, end);
    const int64_t n = m.n_in - part.k < kPanelDepth ? m.n_in - part.k : kPanelDepth;
    pack<T, kPanelColumns>(panel, from, n);
    written_before();
    const int64_t depth = tiles.depth(part.k);
    for (int64_t r = 0; r < tiles.n_rows; r += rows_at_once) {
      float* sums_of_rows = sums + r / tiles.width * 2 * kTile * kTile;
      const BF16* x_tile = x.x + tiles.at(r, part.k);
      const int64_t j = r / rows_at_once * ahead_per_pass;
      const int64_t left = after.n_columns - j;
      const Ahead ahead{after.column(j), left < ahead_per_pass ? left : ahead_per_pass,
                        m.w_row_bytes};
      const int64_t n_tiles = r + tiles.width < tiles.n_rows ? 2 : 1;
      const bool is_last = part.k + kPanelDepth >= m.n_in;
      for (int64_t i = r; is_last && i < r + rows_at_once && i < m.n_rows; ++i) {
        prefetch_to_write<kPanelColumns * 4>(m.y + i * m.y_stride + part.o);
      }
      (n_tiles == 2 ? amx_tiles<2> : amx_tiles<1>)(sums_of_rows, panel, x_tile, depth, tiles.width,
                                                   part.k == 0, ahead);
      if (!is_last) continue;
      for (int64_t t = 0; t < 2 * n_tiles; ++t) {
        const int64_t row = r + t / 2 * tiles.width;
        const int64_t column = t % 2 * kTile;
        const int64_t n_rows = m.n_rows - row < kTile ? m.n_rows - row : kTile;
        const int64_t n_columns = from.n_columns - column;
        if (n_columns <= 0) continue;
        write_tile(m, sums_of_rows + t * kTile * kTile, row, n_rows, part.o + column,
                   n_columns < kTile ? n_columns : kTile);
      }
    }
  };

  configure_tiles(tiles.width);
  if (m.n_rows <= kTile) {
    amx_few_rows<T>(m, x, begin, end, workspace);
    return _tile_release();
  }
  for (int64_t o = begin; o < end; o += group) {
    const int64_t last = end - o < group ? end : o + group;
    for (int64_t k = 0; k < m.n_in; k += kPanelDepth) {
      for (int64_t p = o; p < last; p += kPanelColumns) {
        Part next{p + kPanelColumns, k};
        if (next.o >= last) next = {o, k + kPanelDepth};
        if (next.k >= m.n_in) next = {last, 0};
        if (next.o >= end) next = {p, k};
        multiply({p, k}, all_sums + (p - o) / kPanelColumns * kPanelSums, next);
      }
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace h2o
