// One row of x, rounded to 8 bits, times quantized weights, compiled once per instruction set (see
// cpu/kernels-inl.h); and the parts shared with int8_rows-inl.h and int8_panel-inl.h.
//
// Used by decode steps, which should be bound by reading the weights. The 32 weights of a column
// are multiplied in place; only their sums of four are transposed, so that kWidth columns are
// interleaved when scales are applied.
//
// Requires from vec_*.h, in addition to kernels-inl.h and int8_blocks-inl.h: dot(sums, w, x), which
// adds the four products of unsigned bytes below 129 (VNNI: any) by signed ones in each lane;
// signed_dot for signed bytes, exact if signed_start(sum of x) is added; repeat_quads, 32 bytes of
// x for each column of Quants (part i of them if they exceed a vector); sum_quads, which reduces
// eight vectors with kWidth columns' products, column by column, to the sums of the first and last
// 16 of each column; transpose_quads, from kWidth times 8 quads to 8 times kWidth, `stride` bytes
// apart; low_halves, high_halves, bit_xor.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/int8_blocks-inl.h"

namespace h2o {
namespace {

constexpr int64_t kQuad = 4;          // bytes that one lane multiplies at a time
constexpr int64_t kActivations = 32;  // elements of x that share a scale
constexpr int64_t kQuantVectors = kWidth / kQuantColumns;

template <class Type>
int32_t dot_start(int32_t sum_of_x, int32_t offset) {
  if constexpr (Type::kMins) return 0;  // such types have no offset
  return Type::kSigned ? signed_start(sum_of_x) : -offset * sum_of_x;
}
template <class Type>
Ints dot(Ints sums, Ints w, Ints x) {
  return Type::kSigned ? signed_dot(sums, w, x) : dot(sums, w, x);
}

// Vector i of Quants holds column i of kWidth, and column i + kQuantVectors if it holds two.
struct EvenColumns {
  const std::byte* first;
  int64_t stride;

  const std::byte* column(int64_t i) const { return first + i * stride; }
  Columns vector(int64_t i) const { return {column(i), kQuantVectors * stride}; }
};

// Scales of blocks of 256, one block per column, at byte offset `at`; `stride` floats apart.
template <class Type, class Source>
void read_superblock_scales(float* scales, float* mins, int64_t stride, const Source& columns,
                            int64_t at) {
  Quants packed[kQuantVectors];
#pragma GCC unroll 8
  for (int64_t j = 0; j < kQuantVectors; ++j)
    Type::packed_scales(packed + j, columns.vector(j), at);
  alignas(64) int8_t bytes[sizeof(packed)];
  transpose_quads(bytes, kWidth * kQuad, packed);
  Ints words[8];
  for (int64_t i = 0; i < 8; ++i) words[i] = load_quads(bytes + i * kWidth * kQuad);
  const ScalesInRows<Type> packed_words{words};
  const Vec d = Type::d(packed_words);
#pragma GCC unroll 16
  for (int64_t g = 0; g < Type::kBlock / Type::kGroup; ++g) {
    store(scales + g * stride, mul(d, to_float(Type::scale(packed_words, g))));
  }
  if constexpr (Type::kMins) {
    const Vec dmin = Type::dmin(packed_words);
#pragma GCC unroll 16
    for (int64_t g = 0; g < Type::kBlock / Type::kGroup; ++g) {
      store(mins + g * stride, mul(dmin, to_float(Type::min(packed_words, g))));
    }
  }
}

// For n <= kInt8Depth elements of the columns: a scale and, if the type has them, a min for each
// group, [n / kGroup, stride].
template <class Type, class Source>
void read_scales(float* scales, float* mins, int64_t stride, const Source& columns, int64_t n) {
  using Block = typename Type::Block;
  if constexpr (Type::kUnpacked) {
    for (int64_t j = 0; j < kWidth; ++j) {
      const auto* blocks = reinterpret_cast<const Block*>(columns.column(j));
      constexpr int64_t kGroups = Type::kBlock / Type::kGroup;
      for (int64_t i = 0; i < n / Type::kBlock; ++i) {
        const float factor = Type::factor(blocks[i]);
#pragma GCC unroll 16
        for (int64_t g = 0; g < kGroups; ++g) {
          scales[(i * kGroups + g) * stride + j] = factor * Type::step(blocks[i], g);
        }
      }
    }
  } else if constexpr (Type::kBlock == 256) {
    for (int64_t i = 0; i < n; i += Type::kBlock) {
      const int64_t group = i / Type::kGroup;
      read_superblock_scales<Type>(scales + group * stride, mins + group * stride, stride, columns,
                                   i / Type::kBlock * static_cast<int64_t>(sizeof(Block)));
    }
  } else {
    decltype(Block::d) d[kInt8Depth / Type::kBlock * kWidth];
    F16 m[kInt8Depth / Type::kBlock * kWidth];
    const int64_t n_blocks = n / Type::kBlock;
    for (int64_t j = 0; j < kWidth; ++j) {
      const auto* blocks = reinterpret_cast<const Block*>(columns.column(j));
      const auto copy = [&](int64_t i) {
        d[i * kWidth + j] = blocks[i].d;
        if constexpr (Type::kMins) m[i * kWidth + j] = blocks[i].m;
      };
      int64_t i = 0;
      for (; i + 8 <= n_blocks; i += 8) {
#pragma GCC unroll 8
        for (int64_t b = 0; b < 8; ++b) copy(i + b);
      }
      for (; i < n_blocks; ++i) copy(i);
    }
    // Deferred, because a load that spans several stores waits for them.
    for (int64_t i = 0; i < n_blocks; ++i) {
      store(scales + i * stride, load(d + i * kWidth));
      if constexpr (Type::kMins) store(mins + i * stride, load(m + i * kWidth));
    }
  }
}

void write_outputs(const Matmul& m, int64_t r, int64_t o, int64_t n_columns, const float* sums) {
  float* y = m.y + r * m.y_stride + o;
  int64_t j = 0;
  for (; j + kWidth <= n_columns; j += kWidth) {
    Vec value = load(sums + j);
    if (m.bias != nullptr) value = add(value, load(m.bias + o + j));
    store(y + j, m.add ? add(load(y + j), value) : value);
  }
  for (; j < n_columns; ++j) {
    const float value = m.bias != nullptr ? sums[j] + m.bias[o + j] : sums[j];
    y[j] = m.add ? y[j] + value : value;
  }
}

// The sums of 32 products of the columns with 32 elements of x, in halves.
template <class Type>
H2O_INLINE void dot_columns(Ints (&sums)[2], const EvenColumns& columns, int64_t at, int i,
                            const int8_t* x) {
  constexpr int64_t kParts = 8 / kQuantVectors;  // vectors that 32 weights take
  Ints products[8];
#pragma GCC unroll 8
  for (int64_t j = 0; j < kQuantVectors; ++j) {
    Quants q;
    Type::quants(&q, BlocksInRows{columns.vector(j), at}, i);
#pragma GCC unroll 8
    for (int64_t part = 0; part < kParts; ++part) {
      const Ints w = load_quads(reinterpret_cast<const int8_t*>(&q) + part * kWidth * kQuad);
      products[j * kParts + part] = dot<Type>(ints(0), w, repeat_quads(x, part));
    }
  }
  constexpr int kLargest = kQuad * ((1 << Type::kBits) - 1) * 127;
  sum_quads<kLargest>(sums, products);
}

// One row of x and kWidth columns within a panel's depth. Prefetches from `ahead` on as many bytes
// as these columns have, because hardware prefetchers do not detect them in time and the number of
// outstanding lines is limited. A part goes with each 32 elements, spread over several pages: these
// are read faster together than one after another.
template <class Type>
struct RowPanel {
  static constexpr int64_t kBlockBytes = sizeof(typename Type::Block);
  static constexpr int64_t kAheadLines =
      (kWidth * 32 * kBlockBytes / Type::kBlock + kLine - 1) / kLine;

  EvenColumns columns;
  const float *scales, *mins;  // [depth / kGroup, kWidth]
  const int8_t* x_q;
  const float* x_scales;
  const int32_t* x_sums;
  const std::byte* ahead;
  int64_t ahead_stride;

  // Adds the scaled products of elements [i + g, i + g + 32), where i is a multiple of kBlock.
  H2O_INLINE Vec add_to(Vec total, int64_t i, int g) const {
#pragma GCC unroll 16
    for (int64_t l = 0; l < kAheadLines; ++l) {
      __builtin_prefetch(ahead + l * ahead_stride + (i + g) / 32 * kLine, 0, 2);
    }
    const int64_t at = i / Type::kBlock * kBlockBytes + g / Type::kBlock * kBlockBytes;
    Ints dots[2];
    dot_columns<Type>(dots, columns, at, g % Type::kBlock, x_q + i + g);
    if constexpr (Type::kGroup == 32) dots[0] = add(dots[0], dots[1]);
    const float x_scale = x_scales[(i + g) / kActivations];
#pragma GCC unroll 2
    for (int64_t h = 0; h < 32 / Type::kGroup; ++h) {
      const int64_t group = (i + g) / Type::kGroup + h;
      const Ints dot = add(dots[h], ints(dot_start<Type>(x_sums[group], Type::kOffset)));
      const Vec d = mul(load(scales + group * kWidth), broadcast(x_scale));
      total = add(total, mul(to_float(dot), d));
      if constexpr (Type::kMins) {
        const float sum = x_scale * static_cast<float>(x_sums[group]);
        total = add(total, mul(load(mins + group * kWidth), broadcast(sum)));
      }
    }
    return total;
  }
};

// x times kWidth columns; prefetches the ones at `ahead`.
template <class Type>
Vec int8_row_columns(const Int8Rows& x, const EvenColumns& all, const std::byte* ahead,
                     std::byte* workspace) {
  auto* scales = reinterpret_cast<float*>(workspace);
  float* mins = scales + kInt8Depth / Type::kGroup * kWidth;
  Vec total = zero();
  for (int64_t k = 0; k < x.n_in; k += kInt8Depth) {
    const int64_t n = x.n_in - k < kInt8Depth ? x.n_in - k : kInt8Depth;
    const RowPanel<Type> panel{
        .columns = {all.first + k / Type::kBlock * RowPanel<Type>::kBlockBytes, all.stride},
        .scales = scales,
        .mins = mins,
        .x_q = x.q + k,
        .x_scales = x.scales + k / kActivations,
        .x_sums = x.sums + k / Type::kGroup,
        .ahead = ahead + k / 32 * kLine,
        .ahead_stride = x.n_in / 32 * kLine};
    read_scales<Type>(scales, mins, kWidth, panel.columns, n);
    int64_t i = 0;
    // Unrolled, to reduce address computations.
    for (; i + 256 <= n; i += 256) {
      if constexpr (Type::kUnrolled) {
#pragma GCC unroll 8
        for (int g = 0; g < 256; g += 32) total = panel.add_to(total, i, g);
      } else {
#pragma GCC unroll 1
        for (int g = 0; g < 256; g += 32) total = panel.add_to(total, i, g);
      }
    }
    if constexpr (Type::kBlock < 256) {
      for (; i < n; i += Type::kBlock) {
        for (int g = 0; g < Type::kBlock; g += 32) total = panel.add_to(total, i, g);
      }
    }
  }
  return total;
}

// One row of x times columns [begin, end).
template <class Type>
void int8_row(const Matmul& m, const Int8Rows& x, int64_t begin, int64_t end,
              std::byte* workspace) {
  float sums[kWidth];
  int64_t o = begin;
  for (; o + kWidth <= end; o += kWidth) {
    const std::byte* w = m.w + o * m.w_row_bytes;
    const int64_t next = o + 2 * kWidth <= end ? kWidth * m.w_row_bytes : 0;
    store(sums, int8_row_columns<Type>(x, {w, m.w_row_bytes}, w + next, workspace));
    write_outputs(m, 0, o, kWidth, sums);
  }
  for (; o < end; ++o) {  // remaining columns one at a time, repeated kWidth times
    const std::byte* w = m.w + o * m.w_row_bytes;
    store(sums, int8_row_columns<Type>(x, {w, 0}, w, workspace));
    write_outputs(m, 0, o, 1, sums);
  }
}

}  // namespace
}  // namespace h2o
