// Matmul of quantized weights in 8-bit integers with AMX, bit-identical to int8_matmul-inl.h.
//
// An instruction computes the products of a group of 32 elements of up to 16 rows of x and 16
// columns of a panel: sums in integers, which are exact. They are stored, scaled and accumulated in
// float while the next groups are multiplied.
//
// Few rows are faster with VNNI, and types with groups of 16 as fast.
#pragma once

#include "cpu/matmul/amx_tiles.h"
#include "cpu/matmul/int8_panel-inl.h"
#include "cpu/matmul/interleaved_codebooks-inl.h"

namespace h2o {

extern const ProductKernels kernels_x86_64_v4_vnni;

namespace {

constexpr int64_t kGroup = kActivations;
constexpr int64_t kMinRows = kTile;
constexpr int64_t kRowMultiple = 48;  // also of VNNI's tiles

// The elements of a group are contiguous: a row of a tile register.
using GroupTile = RowTile<kTile, kGroup>;
static_assert(kRowMultiple % kTile == 0 && kRowMultiple % kTileRows == 0);

void quantize_rows(const Int8Rows& to, const float* x, int64_t begin, int64_t end) {
  if (to.n_rows < kMinRows || to.group != kGroup) {
    return kernels_x86_64_v4_vnni.quantize_rows(to, x, begin, end);
  }
  quantize_rows_in_groups<GroupTile, kGroup>(to, x, begin, end);
}

// The quants of a type without offset: the instruction multiplies signed bytes.
template <class Type>
struct Signed : Type {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int i) {
    Type::quants(q, source, i);
    *q -= int8_t{Type::kOffset};
  }
};

// Tile 0: sums; 1: rows of x; 2: weights. 3 and 4: sums and rows of the last rows, fewer than 16.
void configure_tiles(int64_t n_last) {
  TileConfig config;
  config.set(0, kTile, kTileRow);
  config.set(1, kTile, kGroup);
  config.set(2, kGroup / kQuad, kTileRow);
  if (n_last > 0) {
    config.set(3, n_last, kTileRow);
    config.set(4, n_last, kGroup);
  }
  config.load();
}

// Integer sums of the last kGroups groups: up to 16 rows of x, kWidth columns.
struct alignas(64) Buffers {
  static constexpr int64_t kGroups = 4;
  int32_t sums[kGroups][kTile * kWidth];
};

// Multiplies up to 16 rows of x and kWidth columns of a panel, group by group.
template <bool kWhole>
class Products {
 public:
  H2O_INLINE Products(Buffers& buffers, const int8_t* w, const int8_t* x, int64_t n_rows)
      : buffers_(buffers), w_(w), x_(x), x_bytes_(n_rows * kGroup) {}

  // Computes the sums of the next group.
  H2O_INLINE void multiply() {
    int32_t* to = buffers_.sums[n_ % Buffers::kGroups];
    _tile_loadd(2, w_, kColumns * kQuad);
    if constexpr (kWhole) {
      _tile_zero(0);
      _tile_loadd(1, x_, kGroup);
      _tile_dpbssd(0, 1, 2);
      _tile_stored(0, to, kTileRow);
    } else {
      _tile_zero(3);
      _tile_loadd(4, x_, kGroup);
      _tile_dpbssd(3, 4, 2);
      _tile_stored(3, to, kTileRow);
    }
    ++n_;
    w_ += kGroup * kColumns;
    x_ += x_bytes_;
  }

  // Those of group g and row i.
  H2O_INLINE Vec sums(int64_t g, int64_t i) const {
    const int32_t* from = buffers_.sums[g % Buffers::kGroups] + i * kWidth;
    return to_float(load_quads(reinterpret_cast<const int8_t*>(from)));
  }

 private:
  Buffers& buffers_;  // not here: the compiler would keep the rest in memory too
  const int8_t* w_;
  const int8_t* x_;
  int64_t x_bytes_;
  int64_t n_ = 0;
};

// Adds the scaled sums of 16 rows to their totals, which are kept in registers.
template <bool kMins>
void add_whole_tile(const Panel& panel, const Int8Rows& x, float* totals_of_tile, int64_t n_groups,
                    bool first) {
  Buffers buffers;
  for (int64_t column = 0; column < kColumns; column += kWidth) {
    Products<true> products(buffers, panel.q + column * kQuad, x.q, kTile);
    const float* scales = panel.scales + column;
    const float* mins = panel.mins + column;
    Vec totals[kTile];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kTile; ++i) {
      totals[i] = first ? zero() : load(totals_of_tile + i * kColumns + column);
    }
    products.multiply();
    if (n_groups > 1) products.multiply();
    for (int64_t g = 0; g < n_groups; ++g) {
      if (g + 2 < n_groups) products.multiply();  // while others are added
      const float* x_scales = x.scales + g * kTile;
      const Vec scale = load(scales + g * kColumns);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kTile; ++i) {
        const Vec d = mul(scale, broadcast(x_scales[i]));
        totals[i] = add(totals[i], mul(products.sums(g, i), d));
      }
      if constexpr (kMins) {
        const auto* x_sums = reinterpret_cast<const int8_t*>(x.sums + g * kTile);
        float of_rows[kTile];
        store(of_rows, mul(load(x_scales), to_float(load_quads(x_sums))));
        const Vec min = load(mins + g * kColumns);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kTile; ++i) {
          totals[i] = add(totals[i], mul(min, broadcast(of_rows[i])));
        }
      }
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kTile; ++i) {
      store(totals_of_tile + i * kColumns + column, totals[i]);
    }
  }
}

// Computes fewer rows, whose totals are in memory.
template <bool kMins>
void add_last_tile(const Panel& panel, const Int8Rows& x, float* totals_of_tile, int64_t n_rows,
                   int64_t n_groups, bool first) {
  Buffers buffers;
  for (int64_t column = 0; column < kColumns; column += kWidth) {
    Products<false> products(buffers, panel.q + column * kQuad, x.q, n_rows);
    float* totals = totals_of_tile + column;
    for (int64_t i = 0; first && i < n_rows; ++i) store(totals + i * kColumns, zero());
    products.multiply();
    if (n_groups > 1) products.multiply();
    for (int64_t g = 0; g < n_groups; ++g) {
      if (g + 2 < n_groups) products.multiply();
      const Vec scale = load(panel.scales + g * kColumns + column);
      for (int64_t i = 0; i < n_rows; ++i) {
        const float x_scale = x.scales[g * n_rows + i];
        const Vec d = mul(scale, broadcast(x_scale));
        Vec total = add(load(totals + i * kColumns), mul(products.sums(g, i), d));
        if constexpr (kMins) {
          const float sum = x_scale * static_cast<float>(x.sums[g * n_rows + i]);
          total = add(total, mul(load(panel.mins + g * kColumns + column), broadcast(sum)));
        }
        store(totals + i * kColumns, total);
      }
    }
  }
}

template <bool kMins>
void add_tile(const Panel& panel, const Int8Rows& x, float* totals, int64_t n_rows, int64_t n,
              bool first) {
  written_before();
  if (n_rows == kTile) return add_whole_tile<kMins>(panel, x, totals, n / kGroup, first);
  add_last_tile<kMins>(panel, x, totals, n_rows, n / kGroup, first);
}

const Int8Kernels& vnni_kernels(TypeKernels CpuKernels::* type) {
  const Int8Kernels* found = kernels_x86_64_v4_vnni.int8;
  while (found->type != type) ++found;
  return *found;
}

template <auto kKernels, class Type, bool kIsInterleaved>
void amx_int8_matmul(const Matmul& m, const Int8Rows& x, int64_t begin, int64_t end,
                     std::byte* workspace) {
  if (x.n_rows < kMinRows) {
    const Int8Kernels& few = vnni_kernels(kKernels);
    return (kIsInterleaved ? few.interleaved_matmul : few.int8_matmul)(m, x, begin, end, workspace);
  }
  configure_tiles(m.n_rows % kTile);
  multiply_panels<Signed<Type>, kIsInterleaved, GroupTile>(m, x, begin, end, workspace,
                                                           add_tile<Type::kMins>);
  _tile_release();
}

template <auto kKernels, class Type, class Interleaved = Type>
constexpr Int8Kernels amx_int8_kernels() {
  static_assert(Type::kGroup == kGroup);
  return {kKernels, amx_int8_matmul<kKernels, Type, false>,
          amx_int8_matmul<kKernels, Interleaved, true>, kGroup};
}
template <auto kKernels, class Type>
constexpr Int8Kernels amx_codebook_kernels() {
  return amx_int8_kernels<kKernels, Type, InterleavedCodebook<Type>>();
}

}  // namespace
}  // namespace h2o
