// Products of attention with AMX, of floats as sums of two bf16 (see CpuKernels::multiply_split).
//
// x = hi + lo, where hi is x rounded to bf16 and lo the rest rounded to bf16. For f16 and bf16 that
// is exact, for others the rest is at most 2^-16 of x. A product is hi.lo + hi.hi + lo.hi; what is
// left out is at most 2^-16 of it.
//
// A tile register has 16 rows of 32 bf16. An instruction adds the products of 32 pairs, even ones
// and odd ones in order, to 16 x 16 sums. A sum is thus over steps of 32 in order, and does not
// depend on the other rows and columns.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/amx_tiles.h"
#include "cpu/simd/vec_avx512.h"
// After the vector type it is written against:
#include "cpu/matmul/blocks-inl.h"

namespace h2o {
namespace {

constexpr int64_t kPart = kTile * kTileRow;  // bytes of a tile of hi or lo
constexpr int64_t kBoth = 2 * kPart;
constexpr int64_t kSplitStep = 32;  // elements of a row per instruction
constexpr int64_t kBlockBytes = kSplitStep * kSplitColumns * 2 * 2;  // a step of staged columns

// Steps of x that are split at a time: with as many of the staged columns they fit in the L1 cache.
constexpr int64_t kSplitSteps = 4;
constexpr int64_t kSplitX = kSplitSteps * kBoth;
static_assert(kSplitX == kSplitWorkspace);

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// ---- Splitting ----

// 32 numbers as pairs (a[i], b[i]).
struct SplitPairs {
  __m512i hi, lo;
};

// Half a unit of a bf16's last place is added, then the upper 16 bits are taken. `exact`: the rest
// has at most 8 bits.
template <bool exact>
[[gnu::always_inline]] inline SplitPairs split(Vec a, Vec b) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const auto rounded = [&](Vec x) { return _mm512_add_epi32(_mm512_castps_si512(x.v), half); };
  const auto rest = [&](Vec x, __m512i hi) {
    const Vec lo = sub(x, {_mm512_castsi512_ps(_mm512_and_si512(hi, upper))});
    return exact ? _mm512_castps_si512(lo.v) : rounded(lo);
  };
  const auto pairs = [&](__m512i x, __m512i y) {  // x >> 16 | (y & upper)
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(x, 16), y, upper, 0xf8);
  };
  const __m512i a_hi = rounded(a), b_hi = rounded(b);
  return {pairs(a_hi, b_hi), pairs(rest(a, a_hi), rest(b, b_hi))};
}

[[gnu::always_inline]] inline void store_split(std::byte* to, const SplitPairs& pairs) {
  _mm512_store_si512(to, pairs.hi);
  _mm512_store_si512(to + kPart, pairs.lo);
}

template <class Type>
constexpr bool kIsExact = __is_same(Type, Plain<F16>) || __is_same(Type, Plain<BF16>);

// Elements [i, i + kWidth) of a row of n, then zeros.
template <class Type>
[[gnu::always_inline]] inline Vec read(const std::byte* row, int64_t i, int64_t n) {
  if constexpr (Type::kBlock == kWidth) {
    if (i + kWidth > n) return i < n ? Type::tail(row, i, n - i) : zero();
    return Type::block(row, i).at(0);
  } else {
    return i < n ? Type::block(row, i).at(i % Type::kBlock) : zero();
  }
}

// Columns are staged for each step of 32, then for each kSplitColumns of them: two tiles of hi and
// lo, whose rows have a pair of elements of each column.
std::byte* staged_at(std::byte* staged, int64_t step, int64_t column, int64_t n_columns) {
  return staged +
         (step * round_up(n_columns, kSplitColumns) + column) / kSplitColumns * kBlockBytes +
         column % kSplitColumns / kTile * kBoth;
}

template <class Type>
void stage_keys(std::byte* to, const std::byte* const* rows, int64_t n_rows, int64_t n) {
  for (int64_t o = 0; o < round_up(n_rows, kSplitColumns); o += kTile) {
    for (int64_t i = 0; i < n; i += kSplitStep) {
      Vec hi[kTile], lo[kTile];  // each lane a pair
#pragma GCC unroll 1
      for (int64_t j = 0; j < kTile; ++j) {
        SplitPairs pairs{_mm512_setzero_si512(), _mm512_setzero_si512()};
        if (o + j < n_rows) {
          const std::byte* row = rows[o + j];
          pairs = split<kIsExact<Type>>(read<Type>(row, i, n), read<Type>(row, i + kWidth, n));
        }
        hi[j] = {_mm512_castsi512_ps(pairs.hi)};
        lo[j] = {_mm512_castsi512_ps(pairs.lo)};
      }
      transpose(hi);
      transpose(lo);
      std::byte* const tile = staged_at(to, i / kSplitStep, o, n_rows);
#pragma GCC unroll 16
      for (int64_t j = 0; j < kTile; ++j) {
        store_split(tile + j * kTileRow,
                    {_mm512_castps_si512(hi[j].v), _mm512_castps_si512(lo[j].v)});
      }
    }
  }
}

// Values of rows a and b. Raises `largest` to the largest magnitudes, of bf16.
template <class Type>
[[gnu::always_inline]] inline void stage_pair(std::byte* to, const std::byte* a, const std::byte* b,
                                              int64_t n, __m512i& largest) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  for (int64_t c = 0; c < n; c += kWidth) {
    const SplitPairs pairs = split<kIsExact<Type>>(read<Type>(a, c, n), read<Type>(b, c, n));
    largest = _mm512_max_epu16(largest, _mm512_and_si512(pairs.hi, magnitude));
    store_split(to + c / kTile * kBoth, pairs);
  }
}

template <class Type>
bool stage_values(std::byte* to, const std::byte* const* rows, int64_t n_rows, int64_t n) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t k = 0; k < n_rows; k += kSplitStep) {
    for (int64_t j = 0; j < kTile; ++j) {
      std::byte* const tile = staged_at(to, k / kSplitStep, 0, n) + j * kTileRow;
      const std::byte* a = k + j < n_rows ? rows[k + j] : nullptr;
      const std::byte* b = k + j + kTile < n_rows ? rows[k + j + kTile] : nullptr;
      if (n % kSplitColumns == 0 && a != nullptr && b != nullptr) {
        stage_pair<Type>(tile, a, b, n, largest);
        continue;
      }
      for (int64_t c = 0; c < round_up(n, kSplitColumns); c += kWidth) {
        const Vec x = a != nullptr ? read<Type>(a, c, n) : zero();
        const Vec y = b != nullptr ? read<Type>(b, c, n) : zero();
        const SplitPairs pairs = split<kIsExact<Type>>(x, y);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(pairs.hi, _mm512_set1_epi16(0x7fff)));
        store_split(tile + c / kTile * kBoth, pairs);
      }
    }
  }
  constexpr int kInfinity = 0x7f80;
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(kInfinity)) == 0;
}

// ---- Products ----

// Steps of all rows of x: hi and lo of a step are two tiles.
void split_rows(std::byte* to, const SplitProduct& p, int64_t begin, int64_t end) {
  for (int64_t r = 0; r < p.n_rows; ++r) {
    const auto* row = reinterpret_cast<const std::byte*>(p.x + r * p.x_stride);
    std::byte* tile = to + r * kTileRow;
    for (int64_t i = begin; i < end; i += kSplitStep, tile += kBoth) {
      using Floats = Plain<float>;
      store_split(
          tile, split<false>(read<Floats>(row, i, p.n_in), read<Floats>(row, i + kWidth, p.n_in)));
    }
  }
}

// Tiles 0 and 1 are sums of kSplitColumns columns, 2 and 3 rows of x, 4 to 7 columns.
void configure_split(int64_t n_rows) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.set(i, i < 4 ? n_rows : kTile, kTileRow);
  config.load();
}

// Adds the products of steps of x with kSplitColumns columns; the smallest ones first.
void add_products(const std::byte* x, const std::byte* columns, int64_t step, int64_t n_steps) {
  for (int64_t i = 0; i < n_steps; ++i, x += kBoth, columns += step) {
    _tile_loadd(2, x, kTileRow);
    _tile_loadd(3, x + kPart, kTileRow);
    _tile_loadd(4, columns + kPart, kTileRow);
    _tile_loadd(5, columns + kBoth + kPart, kTileRow);
    _tile_loadd(6, columns, kTileRow);
    _tile_loadd(7, columns + kBoth, kTileRow);
    _tile_dpbf16ps(0, 2, 4);
    _tile_dpbf16ps(1, 2, 5);
    _tile_dpbf16ps(0, 3, 6);
    _tile_dpbf16ps(1, 3, 7);
    _tile_dpbf16ps(0, 2, 6);
    _tile_dpbf16ps(1, 2, 7);
  }
}

void multiply_split(const SplitProduct& p) {
  auto* const sums = reinterpret_cast<float*>(p.workspace + kSplitX);
  const int64_t n_out = round_up(p.n_out, kSplitColumns);
  const bool in_place = n_out <= p.y_stride;
  float* const y = in_place ? p.y : sums;
  const int64_t y_stride = in_place ? p.y_stride : n_out;
  const int64_t y_bytes = y_stride * static_cast<int64_t>(sizeof(float));
  const int64_t step = round_up(p.n_columns, kSplitColumns) / kSplitColumns * kBlockBytes;
  for (int64_t r = 0; r < p.n_rows && p.add && !in_place; ++r) {
    for (int64_t c = 0; c < p.n_out; ++c) sums[r * n_out + c] = p.y[r * p.y_stride + c];
  }
  configure_split(p.n_rows);
  for (int64_t begin = 0; begin < p.n_in; begin += kSplitSteps * kSplitStep) {
    const int64_t left = round_up(p.n_in - begin, kSplitStep) / kSplitStep;
    const int64_t n_steps = left < kSplitSteps ? left : kSplitSteps;
    split_rows(p.workspace, p, begin, begin + n_steps * kSplitStep);
    written_before();
    const std::byte* columns = p.staged + begin / kSplitStep * step;
    for (int64_t c = 0; c < n_out; c += kSplitColumns, columns += kBlockBytes) {
      float* const to = y + c;
      if (begin == 0 && !p.add) {
        _tile_zero(0);
        _tile_zero(1);
        // otherwise each of the stores below waits for memory
        for (int64_t r = 0; r < p.n_rows && c + kSplitColumns < n_out; ++r) {
          __builtin_prefetch(to + r * y_stride + kSplitColumns, 1);
          __builtin_prefetch(to + r * y_stride + kSplitColumns + kTile, 1);
        }
      } else {
        _tile_loadd(0, to, y_bytes);
        _tile_loadd(1, to + kTile, y_bytes);
      }
      add_products(p.workspace, columns, step, n_steps);
      _tile_stored(0, to, y_bytes);
      _tile_stored(1, to + kTile, y_bytes);
    }
  }
  _tile_release();
  written_before();
  for (int64_t r = 0; r < p.n_rows && !in_place; ++r) {
    for (int64_t c = 0; c < p.n_out; ++c) p.y[r * p.y_stride + c] = sums[r * n_out + c];
  }
}

// ---- Few rows ----

// Sums of 16 keys and p.n_rows rows of x. The keys are rows of tiles here, and not transposed.
template <class Type>
void multiply_keys(const SplitProduct& p, const std::byte* const* rows) {
  const int64_t n_steps = round_up(p.n_in, kSplitStep) / kSplitStep;
  const int64_t width = 4 * p.n_rows;  // bytes of a row of x's tiles
  std::byte* const x = p.staged;
  std::byte* const keys[] = {x + n_steps * kBoth, x + 2 * n_steps * kBoth};
  for (int64_t r = 0; r < p.n_rows; ++r) {
    const auto* row = reinterpret_cast<const std::byte*>(p.x + r * p.x_stride);
    for (int64_t i = 0; i < n_steps; ++i) {
      using Floats = Plain<float>;
      const int64_t at = i * kSplitStep;
      alignas(64) std::byte pairs[kBoth];
      store_split(pairs, split<false>(read<Floats>(row, at, p.n_in),
                                      read<Floats>(row, at + kWidth, p.n_in)));
      for (int64_t j = 0; j < kTile; ++j) {
        __builtin_memcpy(x + i * kBoth + j * width + r * 4, pairs + j * 4, 4);
        __builtin_memcpy(x + i * kBoth + kPart + j * width + r * 4, pairs + kPart + j * 4, 4);
      }
    }
  }
  const auto split_keys = [&](std::byte* to, int64_t first) {
    for (int64_t j = 0; j < kTile; ++j) {
      const std::byte* row = rows[first + j < p.n_out ? first + j : p.n_out - 1];
      for (int64_t i = 0; i < n_steps; ++i) {
        const int64_t at = i * kSplitStep;
        store_split(to + i * kBoth + j * kTileRow,
                    split<kIsExact<Type>>(read<Type>(row, at, p.n_in),
                                          read<Type>(row, at + kWidth, p.n_in)));
      }
    }
  };
  TileConfig config;  // 0: sums, 2 and 3: keys, 4 and 5: x
  for (int i = 0; i < 8; ++i) config.set(i, kTile, i == 2 || i == 3 ? kTileRow : width);
  config.load();
  alignas(64) float sums[kTile * kTile];
  const __m512i ith = _mm512_mullo_epi32(lanes().v, _mm512_set1_epi32(static_cast<int>(p.n_rows)));
  split_keys(keys[0], 0);
  for (int64_t o = 0; o < p.n_out; o += kTile) {
    // The next ones first: tiles are loaded when all that was stored has reached the cache.
    if (o + kTile < p.n_out) split_keys(keys[(o / kTile + 1) % 2], o + kTile);
    written_before();
    const std::byte* k = keys[o / kTile % 2];
    _tile_zero(0);
    for (int64_t i = 0; i < n_steps; ++i, k += kBoth) {
      _tile_loadd(2, k + kPart, kTileRow);
      _tile_loadd(4, x + i * kBoth, width);
      _tile_dpbf16ps(0, 2, 4);
      _tile_loadd(3, k, kTileRow);
      _tile_loadd(5, x + i * kBoth + kPart, width);
      _tile_dpbf16ps(0, 3, 5);
      _tile_dpbf16ps(0, 3, 4);
    }
    _tile_stored(0, sums, width);
    written_before();
    for (int64_t r = 0; r < p.n_rows; ++r) {
      store(p.y + r * p.y_stride + o, {_mm512_i32gather_ps(ith, sums + r, sizeof(float))});
    }
  }
  _tile_release();
}

template <class Type>
constexpr SplitKernels split_kernels() {
  return {multiply_keys<Type>, stage_keys<Type>, stage_values<Type>};
}

}  // namespace
}  // namespace h2o
