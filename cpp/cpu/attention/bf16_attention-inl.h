// Products of attention in bf16 with AVX-512 BF16 (see Bf16Attention and cpu/kernels-inl.h). As in
// bf16_matmul-inl.h, products are exact; each lane adds two at a time, rounding after each.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/bf16_matmul-inl.h"
#include "cpu/matmul/short_rows-inl.h"

namespace h2o {
namespace {

// ---- Queries and keys ----

// Rows of pairs of bf16, for short_matmul().
struct PairRows {
  static Vec multiply_add(Vec a, Vec b, Vec sums) {
    return dot_pairs(sums, {(__m512bh)a.v}, {(__m512bh)b.v});
  }
  template <class T>
  static void read(float* to, const std::byte* row, int64_t n) {
    round_row(reinterpret_cast<BF16*>(to), reinterpret_cast<const T*>(row), 2 * n);
  }
};

template <class T, int O>
void multiply_some_keys(const Matmul& m, const Bf16Rows& x, int64_t o) {
  const WeightColumns<T> keys = columns_from<T>(m, o);
  for (int64_t r = 0; r < m.n_rows; r += kBf16Rows) {
    bf16_tile_of<T, kBf16Rows, O>(m.n_rows - r, m, x, keys, r, o, {0, m.n_in, nullptr});
  }
}

template <class T>
void multiply_keys(const Matmul& m, const Bf16Rows& x, int64_t n) {
  if (m.n_rows >= kWidth) {
    Matmul pairs = m;
    pairs.x = reinterpret_cast<const float*>(x.x);
    pairs.n_in = m.n_in / 2;
    return short_matmul<T, PairRows>(pairs, 0, n);
  }
  int64_t o = 0;
  for (; o + kBf16Columns <= n; o += kBf16Columns) multiply_some_keys<T, kBf16Columns>(m, x, o);
  for (; o < n; ++o) multiply_some_keys<T, 1>(m, x, o);
}

// ---- Exponentials and values ----

// a[0], b[0], a[1], b[1], ... of kWidth elements each.
Pairs interleave(__m512i a_then_b) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return {(__m512bh)_mm512_permutexvar_epi16(order, a_then_b)};
}
Pairs interleave(const F16* a, const F16* b) {
  return interleave((__m512i)_mm512_cvtne2ps_pbh(load(b).v, load(a).v));
}
Pairs interleave(const BF16* a, const BF16* b) {
  const auto half = [](const BF16* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  };
  return interleave(_mm512_inserti64x4(_mm512_castsi256_si512(half(a)), half(b), 1));
}

// Pairs of rows: i and i + 1, if there is such a row; otherwise zeros.
template <class T>
struct ValueRows {
  const std::byte* const* rows;
  int64_t n_rows;
  const T* zeros;  // [kMostHeadDim]

  Pairs pairs(int64_t i, int64_t c) const {
    const T* const row = reinterpret_cast<const T*>(rows[i]);
    const T* const next = i + 1 < n_rows ? reinterpret_cast<const T*>(rows[i + 1]) : zeros;
    return interleave(row + c, next + c);
  }
};

// The same, staged: [pairs, n, 2].
struct StagedValues {
  const BF16* pairs_of;
  int64_t n;

  Pairs pairs(int64_t i, int64_t c) const { return load_pairs(pairs_of + i * n + 2 * c); }
};

// Rounded exponentials of some rows of values.
struct RoundedExps {
  const BF16* p;  // [n_out, stride], zero at n_rows if that is odd
  int64_t stride;
  int64_t n_rows;
};

// Outputs [R rows from r] x [C vectors from c]. Pairs of rows are added in order, so the result
// does not depend on R and C.
template <int R, int C, class Values>
void add_values_tile(const AddValues& a, const RoundedExps& exps, const Values& values, int64_t r,
                     int64_t c) {
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) sums[i][j] = load(a.y + (r + i) * a.n + c + j * kWidth);
  }
  const BF16* const p = exps.p + r * exps.stride;
  for (int64_t k = 0; k < exps.n_rows; k += 2) {
    Pairs pairs[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) pairs[j] = values.pairs(k, c + j * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      int both;
      __builtin_memcpy(&both, p + i * exps.stride + k, sizeof(both));
      const Pairs weights{(__m512bh)_mm512_set1_epi32(both)};
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sums[i][j] = dot_pairs(sums[i][j], weights, pairs[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) store(a.y + (r + i) * a.n + c + j * kWidth, sums[i][j]);
  }
}

// Computes n <= R rows.
template <int R, int C, class Values>
void add_values_tile_of(int64_t n, const AddValues& a, const RoundedExps& exps,
                        const Values& values, int64_t r, int64_t c) {
  if constexpr (R > 1) {
    if (n < R) return add_values_tile_of<R - 1, C>(n, a, exps, values, r, c);
  }
  add_values_tile<R, C>(a, exps, values, r, c);
}

template <class Values>
void add_values_tiles(const AddValues& a, const RoundedExps& exps, const Values& values) {
  constexpr int kRows = 6;
  for (int64_t c = 0; c < a.n;) {
    const bool four = c + 4 * kWidth <= a.n;
    for (int64_t r = 0; r < a.n_out; r += kRows) {
      if (four) {
        add_values_tile_of<kRows, 4>(a.n_out - r, a, exps, values, r, c);
      } else {
        add_values_tile_of<kRows, 2>(a.n_out - r, a, exps, values, r, c);
      }
    }
    c += (four ? 4 : 2) * kWidth;
  }
}

void round_exps(BF16* to, int64_t stride, const AddValues& a) {
  for (int64_t r = 0; r < a.n_out; ++r) {
    round_row(to + r * stride, a.p + r * a.p_stride, a.n_rows);
  }
}

// Outputs for which values are staged, at most; numbers that are staged at a time: values, and
// exponentials of each output. Together they take half of an L1 cache, or a little more.
constexpr int64_t kStagedOutputs = 96;
constexpr int64_t kStagedValues = 4096;
constexpr int64_t kStagedRows = 64;

// Some rows for some outputs.
template <class T>
void add_staged_values(const AddValues& a, const ValueRows<T>& rows) {
  alignas(64) BF16 exps[kStagedOutputs * kStagedRows];
  alignas(64) BF16 values[kStagedValues];
  round_exps(exps, kStagedRows, a);
  for (int64_t i = 0; i < a.n_rows; i += 2) {
    for (int64_t c = 0; c < a.n; c += kWidth) {
      store_pairs(values + i * a.n + 2 * c, rows.pairs(i, c));
    }
  }
  add_values_tiles(a, {exps, kStagedRows, a.n_rows}, StagedValues{values, a.n});
}

template <class T>
void add_values(const AddValues& a) {
  constexpr int64_t kFew = 8;
  alignas(64) static constexpr T kZeros[kMostHeadDim] = {};
  const bool stages = a.n_out > kFew;
  const int64_t n_fitting = kStagedValues / a.n / 2 * 2;
  const int64_t n_together = stages && n_fitting < kStagedRows ? n_fitting : kStagedRows;
  const int64_t n_outputs = stages ? kStagedOutputs : kFew;
  for (int64_t r = 0; r < a.n_out; r += n_outputs) {
    for (int64_t i = 0; i < a.n_rows; i += n_together) {
      AddValues part = a;
      part.y += r * a.n;
      part.p += r * a.p_stride + i;
      part.rows += i;
      part.n_out = a.n_out - r < n_outputs ? a.n_out - r : n_outputs;
      part.n_rows = a.n_rows - i < n_together ? a.n_rows - i : n_together;
      const ValueRows<T> rows{part.rows, part.n_rows, kZeros};
      if (stages) {
        add_staged_values(part, rows);
      } else {
        alignas(64) BF16 exps[kFew * kStagedRows];
        round_exps(exps, kStagedRows, part);
        add_values_tiles(part, {exps, kStagedRows, part.n_rows}, rows);
      }
    }
  }
}

template <class T>
constexpr Bf16Attention bf16_attention() {
  return {multiply_keys<T>, add_values<T>};
}

}  // namespace
}  // namespace h2o
