// Matmul of F16 and BF16 weights in bf16 with AVX-512 BF16 (see cpu/kernels-inl.h): like
// matmul-inl.h with factors of 8 significant bits. Products are exact; each lane adds two at a
// time, rounding after each.
#pragma once

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/matmul/bf16_avx512.h"
#include "cpu/matmul/blocks-inl.h"
#include "cpu/matmul/terms-inl.h"

namespace h2o {
namespace {

// Rows and columns of a tile.
constexpr int kBf16Rows = 3;
constexpr int kBf16Columns = 8;

// Terms for which a tile's weights stay in the L1 cache: all of a row's, or parts of them for some
// tiles of rows, whose sums stay there as well.
constexpr int64_t kBf16Terms = 2048;
constexpr int64_t kBf16PartTerms = 1536;
constexpr int64_t kBf16PartRows = 20 * kBf16Rows;

// Numbers of x that stay in the L2 cache; columns of weights that are rounded together, for few
// rows or many; and how many rows are few.
constexpr int64_t kBf16Cached = 192 * 1024;
constexpr int64_t kBf16Gathered = 32;
constexpr int64_t kBf16GatheredForFew = kBf16Columns;
constexpr int64_t kBf16FewRows = 3 * kBf16Rows;

// Adds the two products of each lane.
Vec dot_pairs(Vec sums, Pairs a, Pairs b) { return {_mm512_dpbf16_ps(sums.v, a.v, b.v)}; }

// n numbers, rounded, and zeros up to a multiple of kPairWidth.
template <class T>
void round_row(BF16* to, const T* x, int64_t n) {
  int64_t i = 0;
  for (; i + kPairWidth <= n; i += kPairWidth) store_pairs(to + i, load_pairs(x + i));
  if (i < n) store_pairs(to + i, load_first_pairs(x + i, n - i));
}

// The sums of each vector's lanes, added in the order of store_sums().
H2O_INLINE __m256 add_lanes(const Vec (&a)[8]) {
  __m512 halves[4];  // of two vectors, added; then quarters, and so on
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 even = a[2 * i].v, odd = a[2 * i + 1].v;
    halves[i] =
        _mm512_add_ps(_mm512_shuffle_f32x4(even, odd, 0x44), _mm512_shuffle_f32x4(even, odd, 0xee));
  }
  const auto quarters = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  const __m512 low = quarters(halves[0], halves[1]), high = quarters(halves[2], halves[3]);
  __m512 s = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, s));
}

// Rows of x are stored one after another, padded to whole registers.
void round_rows(const Bf16Rows& to, const float* x, int64_t begin, int64_t end) {
  const int64_t stride = padded_to(to.n_in, kPairWidth);
  for (int64_t r = begin; r < end; ++r) round_row(to.x + r * stride, x + r * to.n_in, to.n_in);
}

// The weights of a tile, in the file or, rounded, in the workspace.
template <class T>
struct WeightColumns {
  const T* w;
  int64_t row_bytes;
  int64_t n;  // per row; a multiple of kPairWidth if rounded

  const T* row(int64_t j) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(w) + j * row_bytes);
  }
};

// Outputs [R rows from r] x [O columns from o], with weights `columns`. Each has one accumulator
// over n_in, so its value does not depend on R and O.
template <class T, int R, int O>
void bf16_tile(const Matmul& m, const Bf16Rows& rows, const WeightColumns<T>& columns, int64_t r,
               int64_t o, const Terms& terms, int64_t ahead = 0) {
  const int64_t stride = padded_to(m.n_in, kPairWidth);
  const BF16* x = rows.x + r * stride;
  Vec sums[R][O];
  begin_sums(sums, terms);
  // Unrolled here, as in matmul_tile(): otherwise GCC 12 keeps the sums in memory.
  int64_t k = terms.begin;
  for (; k + kPairWidth <= terms.end; k += kPairWidth) {
#pragma GCC unroll 8
    for (int j = 0; j < O; ++j) {
      const T* w = columns.row(j) + k;
      if constexpr (R == 1) {
        __builtin_prefetch(reinterpret_cast<const std::byte*>(w) + ahead);
      }
      const Pairs pairs = load_pairs(w);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) {
        sums[i][j] = dot_pairs(sums[i][j], load_pairs(x + i * stride + k), pairs);
      }
    }
  }
  if (k < terms.end) {
#pragma GCC unroll 8
    for (int j = 0; j < O; ++j) {
      const Pairs pairs = load_first_pairs(columns.row(j) + k, terms.end - k);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) {
        sums[i][j] = dot_pairs(sums[i][j], load_pairs(x + i * stride + k), pairs);
      }
    }
  }
  if (terms.end < columns.n) return keep_sums(sums, terms);
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
    float* y = m.y + (r + i) * m.y_stride + o;
    if constexpr (O == 8) {
      __m256 values = add_lanes(sums[i]);
      if (m.bias != nullptr) values = _mm256_add_ps(values, _mm256_loadu_ps(m.bias + o));
      if (m.add) values = _mm256_add_ps(values, _mm256_loadu_ps(y));
      _mm256_storeu_ps(y, values);
    } else {
      static_assert(O == 1);
      float value = sum(sums[i][0]);
      if (m.bias != nullptr) value += m.bias[o];
      *y = m.add ? value + *y : value;
    }
  }
}

// Computes n <= R rows.
template <class T, int R, int O>
void bf16_tile_of(int64_t n, const Matmul& m, const Bf16Rows& rows, const WeightColumns<T>& columns,
                  int64_t r, int64_t o, const Terms& terms) {
  if constexpr (R > 1) {
    if (n < R) return bf16_tile_of<T, R - 1, O>(n, m, rows, columns, r, o, terms);
  }
  bf16_tile<T, R, O>(m, rows, columns, r, o, terms);
}

template <class T>
WeightColumns<T> columns_from(const Matmul& m, int64_t o) {
  return {reinterpret_cast<const T*>(m.w + o * m.w_row_bytes), m.w_row_bytes, m.n_in};
}

// Weights to prefetch in parts, between tiles: a burst of requests would wait for memory.
struct Upcoming {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  int64_t part = 0;  // bytes

  void prefetch_part() {
    const std::byte* const stop = begin + std::min<int64_t>(part, end - begin);
    for (; begin < stop; begin += kLine) __builtin_prefetch(begin, 0, 2);
  }
};

// O columns of the rows [first, last).
template <class T, int O>
void bf16_tiles(const Matmul& m, const Bf16Rows& rows, const WeightColumns<T>& columns,
                int64_t first, int64_t last, int64_t o, Upcoming& upcoming) {
  Vec kept[kBf16PartRows * O];
  const bool whole = columns.n <= kBf16Terms || last - first <= kBf16Rows;
  const int64_t n_terms = whole ? columns.n : part_size(columns.n, kBf16PartTerms);
  const int64_t n_rows = whole ? last - first : kBf16PartRows;
  for (int64_t begin = first; begin < last; begin += n_rows) {
    const int64_t end = std::min(begin + n_rows, last);
    for (int64_t k = 0; k < columns.n; k += n_terms) {
      Terms terms{k, std::min(k + n_terms, columns.n), kept};
      for (int64_t r = begin; r < end; r += kBf16Rows) {
        bf16_tile_of<T, kBf16Rows, O>(end - r, m, rows, columns, r, o, terms);
        terms.kept += kBf16Rows * O;
        if (k == 0) upcoming.prefetch_part();
      }
    }
  }
}

// Columns [begin, end) of all rows, the first of which is columns.row(0). Rows are divided into
// blocks that stay in the L2 cache while iterating over columns.
template <class T>
void bf16_columns(const Matmul& m, const Bf16Rows& rows, const WeightColumns<T>& columns,
                  int64_t begin, int64_t end, Upcoming upcoming = {}) {
  const int64_t n_cached = kBf16Cached / (padded_to(m.n_in, kPairWidth) * kBf16Rows);
  const int64_t n_rows = std::max<int64_t>(n_cached, 1) * kBf16Rows;
  for (int64_t first = 0; first < m.n_rows; first += n_rows) {
    const int64_t last = std::min(first + n_rows, m.n_rows);
    WeightColumns<T> some = columns;
    int64_t o = begin;
    for (; o + kBf16Columns <= end; o += kBf16Columns) {
      some.w = columns.row(o - begin);
      bf16_tiles<T, kBf16Columns>(m, rows, some, first, last, o, upcoming);
    }
    for (; o < end; ++o) {
      some.w = columns.row(o - begin);
      bf16_tiles<T, 1>(m, rows, some, first, last, o, upcoming);
    }
  }
}

// Computes several tiles of rows. Weights are first copied to the workspace: f16 is rounded
// once, and rows of 4096 bytes do not map to the same cache lines. Meanwhile, the next ones are
// prefetched: during what takes longer, rounding for few rows and multiplying for many.
template <class T>
void gathered_columns(const Matmul& m, const Bf16Rows& rows, int64_t begin, int64_t end,
                      std::byte* workspace) {
  const int64_t n = padded_to(m.n_in, kPairWidth);
  const int64_t stride = n + kPairWidth;
  const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(BF16));
  const bool few = m.n_rows <= kBf16FewRows;
  const int64_t n_fitting =
      std::min(few ? kBf16GatheredForFew : kBf16Gathered, kBf16Workspace / row_bytes);
  if (n_fitting < kBf16Columns) {
    return bf16_columns(m, rows, columns_from<T>(m, begin), begin, end);
  }
  BF16* gathered = reinterpret_cast<BF16*>(workspace);
  const int64_t n_gathered = n_fitting / kBf16Columns * kBf16Columns;
  const int64_t n_tiles = (m.n_rows + kBf16Rows - 1) / kBf16Rows * (n_gathered / kBf16Columns);
  for (int64_t o = begin; o < end; o += n_gathered) {
    const int64_t next = std::min(o + n_gathered, end);
    Upcoming upcoming{.begin = m.w + next * m.w_row_bytes,
                      .end = m.w + std::min(next + n_gathered, end) * m.w_row_bytes};
    upcoming.part = few ? m.w_row_bytes : (upcoming.end - upcoming.begin + n_tiles - 1) / n_tiles;
    const WeightColumns<T> columns = columns_from<T>(m, o);
    for (int64_t j = 0; j < next - o; ++j) {
      if (few) upcoming.prefetch_part();
      round_row(gathered + j * stride, columns.row(j), m.n_in);
    }
    bf16_columns(m, rows, WeightColumns<BF16>{gathered, row_bytes, n}, o, next, upcoming);
  }
}

template <class T>
void bf16_matmul(const Matmul& m, const Bf16Rows& rows, int64_t begin, int64_t end,
                 std::byte* workspace) {
  if (m.n_rows > kBf16Rows) return gathered_columns<T>(m, rows, begin, end, workspace);
  if (m.n_rows > 1) return bf16_columns(m, rows, columns_from<T>(m, begin), begin, end);
  // One column after another: the fastest order for memory.
  for (int64_t o = begin; o < end; ++o) {
    const int64_t ahead = m.prefetches && o + 1 < end ? m.w_row_bytes : 0;
    bf16_tile<T, 1, 1>(m, rows, columns_from<T>(m, o), 0, o, {0, m.n_in, nullptr}, ahead);
  }
}

}  // namespace
}  // namespace h2o
