// The bodies of CpuKernels, written once against the vector type of cpu/simd/vec_*.h and compiled
// once per instruction set. Everything is in an anonymous namespace and calls nothing from the
// standard library: a shared inline function compiled here could end up in code for an older CPU.
//
// Requires from vec_*.h: Vec, kWidth, zero, broadcast, load(float|F16|BF16|int8_t), store,
// store_f16, load_first and store_first (fewer than kWidth), load_even_odd, store_even_odd,
// fma(a, b, c) = a * b + c, add, sub, mul, div, max, min, sum, store_sums (of four), kLaneOrder,
// transpose, maximum, round, times_power_of_two; and of kWidth int32: Ints, ints (broadcast),
// lanes (0, 1, ...), load_bytes (of uint8_t), add, sub, bit_and, bit_or, shift_left and
// shift_right by another Ints, to_float, lookup(table of 16, indices).
#pragma once

#include "cpu/attention/archive_types-inl.h"
#include "cpu/attention/softmax-inl.h"
#include "cpu/elementwise-inl.h"
#include "cpu/kernels.h"
#include "cpu/matmul/blocks-inl.h"
#include "cpu/matmul/int8_types-inl.h"
#include "cpu/matmul/matmul-inl.h"
#include "cpu/recurrent-inl.h"

namespace h2o {
namespace {

// ---- Rows ----

void encode_f32(std::byte* y, const float* x, int64_t n) {
  float* out = reinterpret_cast<float*>(y);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i];
}

void encode_f16(std::byte* y, const float* x, int64_t n) {
  F16* out = reinterpret_cast<F16*>(y);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store_f16(out + i, load(x + i));
  if (i < n) {
    F16 all[kWidth];
    store_f16(all, load_first(x + i, n - i));
    for (int64_t j = 0; i < n; ++i, ++j) out[i] = all[j];
  }
}

// Round to nearest even; NaN keeps its sign and becomes quiet.
void encode_bf16(std::byte* y, const float* x, int64_t n) {
  BF16* out = reinterpret_cast<BF16*>(y);
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof(bits));
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint32_t rounded = nan ? bits | 0x00400000 : bits + 0x7fff + ((bits >> 16) & 1);
    out[i].bits = static_cast<uint16_t>(rounded >> 16);
  }
}

// The scale of a block, which is stored in f16.
F16 scale_of(float d) {
  F16 all[kWidth];
  store_f16(all, broadcast(d));
  return all[0];
}

// Matches GGUF's reference: d = largest magnitude / 127, ties away from zero. n is a multiple of
// the block size.
void encode_q8_0(std::byte* y, const float* x, int64_t n) {
  BlockQ8_0* out = reinterpret_cast<BlockQ8_0*>(y);
  for (int64_t b = 0; b < n / 32; ++b, x += 32) {
    float largest = 0;
    for (int64_t i = 0; i < 32; ++i) {
      const float magnitude = __builtin_fabsf(x[i]);
      largest = magnitude > largest ? magnitude : largest;
    }
    const float d = largest / 127;
    const float inverse = d > 0 ? 1 / d : 0;
    out[b].d = scale_of(d);
    for (int64_t i = 0; i < 32; ++i) {
      const float q = __builtin_roundf(x[i] * inverse);
      out[b].qs[i] = static_cast<int8_t>(q > -127 ? (q < 127 ? q : 127) : -127);  // NaN: -127
    }
  }
}

// Matches GGUF's reference: d = the value of largest magnitude / -2^(bits - 1). Returns d.
template <int kBits>
float quantize_symmetric(uint8_t (&q)[32], const float* x) {
  constexpr int kZero = 1 << (kBits - 1);
  float farthest = 0;
  for (int64_t i = 0; i < 32; ++i) {
    if (__builtin_fabsf(x[i]) > __builtin_fabsf(farthest)) farthest = x[i];
  }
  const float d = farthest / -kZero;
  const float inverse = d != 0 ? 1 / d : 0;
  for (int64_t i = 0; i < 32; ++i) {
    constexpr float kLargest = 2 * kZero - 1;
    const float level = x[i] * inverse + (kZero + 0.5f);
    q[i] = static_cast<uint8_t>(level > 0 ? (level < kLargest ? level : kLargest) : 0);  // NaN: 0
  }
  return d;
}

// Here and below, n is a multiple of the block size.
void encode_q4_0(std::byte* y, const float* x, int64_t n) {
  BlockQ4_0* out = reinterpret_cast<BlockQ4_0*>(y);
  for (int64_t b = 0; b < n / 32; ++b, x += 32) {
    uint8_t q[32];
    out[b].d = scale_of(quantize_symmetric<4>(q, x));
    for (int64_t i = 0; i < 16; ++i) out[b].qs[i] = static_cast<uint8_t>(q[i] | q[i + 16] << 4);
  }
}

void encode_q5_0(std::byte* y, const float* x, int64_t n) {
  BlockQ5_0* out = reinterpret_cast<BlockQ5_0*>(y);
  for (int64_t b = 0; b < n / 32; ++b, x += 32) {
    uint8_t q[32];
    out[b].d = scale_of(quantize_symmetric<5>(q, x));
    uint32_t fifths = 0;
    for (int64_t i = 0; i < 32; ++i) fifths |= static_cast<uint32_t>(q[i] >> 4) << i;
    __builtin_memcpy(out[b].qh, &fifths, sizeof(fifths));
    for (int64_t i = 0; i < 16; ++i) {
      out[b].qs[i] = static_cast<uint8_t>((q[i] & 15) | q[i + 16] << 4);
    }
  }
}

// Reads C vectors from column c of a row of values.
template <class Type, int C>
void read_columns(const std::byte* row, int64_t c, Vec (&values)[C]) {
  if constexpr (Type::kBlock == kWidth) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) values[j] = Type::block(row, c + j * kWidth).at(0);
  } else {
    static_assert(Type::kBlock == Type::kGroup && Type::kBlock == C * kWidth);
    const Type block = Type::block(row, c);
    for (int j = 0; j < C; ++j) values[j] = block.at(j * kWidth);
  }
}

// Values for few outputs take longer to arrive than to be multiplied. Hardware prefetchers stop at
// the end of a page. Fewer rows are prefetched by SegmentHead.
constexpr int64_t kRowsAhead = 96;

// Outputs [R rows from r] x [C vectors from c]. Values are accumulated in row order, so the result
// does not depend on R and C.
template <class Type, int R, int C>
void add_rows_tile(const AddRows& a, int64_t r, int64_t c) {
  // Unrolled here: otherwise GCC 12 stores all sums to memory in every step.
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) sums[i][j] = load(a.y + (r + i) * a.n + c + j * kWidth);
  }
  const float* p = a.p + r * a.p_stride;
  const int64_t ahead = a.n_rows > kRowsAhead ? kRowsAhead * a.row_bytes : 0;
  for (int64_t k = 0; k < a.n_rows; ++k) {
    Vec values[C];
    const std::byte* row = a.rows + k * a.row_bytes;
    if constexpr (R < kTileRows && Type::kBlock == kWidth) {
#pragma GCC unroll 8
      for (int j = 0; j < C; j += 2) {
        Type::block(row, c + j * kWidth).prefetch(ahead);
      }
    }
    read_columns<Type, C>(row, c, values);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const Vec weight = broadcast(p[i * a.p_stride + k]);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sums[i][j] = fma(weight, values[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) store(a.y + (r + i) * a.n + c + j * kWidth, sums[i][j]);
  }
}

// Computes n <= R rows.
template <class Type, int R, int C>
void add_rows_tile_of(int64_t n, const AddRows& a, int64_t r, int64_t c) {
  if constexpr (R > 1) {
    if (n < R) return add_rows_tile_of<Type, R - 1, C>(n, a, r, c);
  }
  add_rows_tile<Type, R, C>(a, r, c);
}

template <class Type, int C>
void add_rows_columns(const AddRows& a, int64_t c) {
  // Rows of accumulators: as many as fit in registers.
  constexpr int kRows = kWidth == 16 || C <= 2 ? 6 : 4;
  for (int64_t r = 0; r < a.n_out; r += kRows) {
    add_rows_tile_of<Type, kRows, C>(a.n_out - r, a, r, c);
  }
}

template <class Type>
void add_rows_as_stored(const AddRows& a) {
  // A block, or as many vectors as fit in registers for several rows.
  constexpr int kVectors = Type::kBlock > kWidth ? Type::kBlock / kWidth : kWidth < 16 ? 2 : 4;
  int64_t c = 0;
  for (; c + kVectors * kWidth <= a.n; c += kVectors * kWidth) {
    add_rows_columns<Type, kVectors>(a, c);
  }
  if constexpr (Type::kBlock == kWidth) {
    for (; c + 2 * kWidth <= a.n; c += 2 * kWidth) add_rows_columns<Type, 2>(a, c);
    for (; c + kWidth <= a.n; c += kWidth) add_rows_columns<Type, 1>(a, c);
    for (int64_t r = 0; c < a.n && r < a.n_out; ++r) {
      Vec total = load_first(a.y + r * a.n + c, a.n - c);
      for (int64_t k = 0; k < a.n_rows; ++k) {
        const Vec values = Type::tail(a.rows + k * a.row_bytes, c, a.n - c);
        total = fma(broadcast(a.p[r * a.p_stride + k]), values, total);
      }
      store_first(a.y + r * a.n + c, total, a.n - c);
    }
  }
}

// The floats that are decoded at a time for several tiles of outputs: half of an L1 cache.
constexpr int64_t kDecodedFloats = 4096;

template <class Type>
void add_rows(const AddRows& a) {
  constexpr int64_t kFew = 12;
  if (__is_same(Type, Plain<float>) || a.n_out <= kFew || a.n > kDecodedFloats) {
    return add_rows_as_stored<Type>(a);
  }
  alignas(64) float values[kDecodedFloats];
  AddRows part = a;
  part.rows = reinterpret_cast<const std::byte*>(values);
  part.row_bytes = a.n * static_cast<int64_t>(sizeof(float));
  const int64_t n_decoded = kDecodedFloats / a.n;
  for (int64_t k = 0; k < a.n_rows; k += n_decoded) {
    part.n_rows = a.n_rows - k < n_decoded ? a.n_rows - k : n_decoded;
    part.p = a.p + k;
    for (int64_t i = 0; i < part.n_rows; ++i) {
      decode<Type>(values + i * a.n, a.rows + (k + i) * a.row_bytes, a.n);
    }
    add_rows_as_stored<Plain<float>>(part);
  }
}

// Kernels of types that K and V support too: quantized weights are multiplied in integers, keys
// in float.
template <class Type>
constexpr TypeKernels cached(void (*encode)(std::byte*, const float*, int64_t)) {
  return {
      .matmul = matmul<Type>, .decode = decode<Type>, .encode = encode, .add_rows = add_rows<Type>};
}

// Kernels of types that only weights have.
template <class Type>
constexpr TypeKernels weights() {
  return {.decode = decode<Type>};
}

// Weights of one or two bits are multiplied in float, as they are in the file: rounded activations
// would add as much error as the weights have.
template <class Type>
constexpr TypeKernels in_float() {
  return {.matmul = matmul<Type>, .decode = decode<Type>};
}

// Kernels of types that are expanded to be interleaved, as unpacking them is slower than reading
// more bytes.
template <class Type, class Interleaved>
constexpr TypeKernels unpacked(decltype(TypeKernels::unpack) unpack) {
  return {.decode = decode<Unpacked<Type>>,
          .unpack = unpack,
          .decode_unpacked = decode<Unpacked<Interleaved>>};
}
template <class Type>
constexpr TypeKernels codebook() {
  return unpacked<Type, InterleavedCodebook<Type>>(unpack_codebook<Type>);
}

constexpr CpuKernels kernels_for(const char* isa) {
  CpuKernels kernels{
      .isa = isa,
      .f32 = cached<Plain<float>>(encode_f32),
      .f16 = cached<Plain<F16>>(encode_f16),
      .bf16 = cached<Plain<BF16>>(encode_bf16),
      .q4_0 = cached<Q4_0>(encode_q4_0),
      .q4_1 = weights<Q4_1>(),
      .q5_0 = cached<Q5_0>(encode_q5_0),
      .q5_1 = weights<Q5_1>(),
      .q8_0 = cached<Q8_0>(encode_q8_0),
      .q2_k = weights<Q2_K>(),
      .q3_k = weights<Q3_K>(),
      .q4_k = weights<Q4_K>(),
      .q5_k = weights<Q5_K>(),
      .q6_k = weights<Q6_K>(),
      .iq4_nl = weights<IQ4_NL>(),
      .iq4_xs = weights<IQ4_XS>(),
      .mxfp4 = weights<MXFP4>(),
      .iq1_s = codebook<Int8IQ1_S>(),
      .iq1_m = codebook<Int8IQ1_M>(),
      .iq2_xxs = codebook<Int8IQ2_XXS>(),
      .iq2_xs = codebook<Int8IQ2_XS>(),
      .iq2_s = codebook<Int8IQ2_S>(),
      .iq3_xxs = codebook<Int8IQ3_XXS>(),
      .iq3_s = codebook<Int8IQ3_S>(),
      .tq1_0 = unpacked<Int8TQ1_0, Int8TQ2_0>(unpack_tq1_0),
      .tq2_0 = weights<Unpacked<Int8TQ2_0>>(),
      .nvfp4 = unpacked<Int8NVFP4, InterleavedNVFP4>(unpack_nvfp4),
      .q1_0 = in_float<Unpacked<Int8Q1_0>>(),
      .q2_0 = in_float<Unpacked<Int8Q2_0>>(),
      .q2 = {.decode = decode<Q2>, .encode = encode_q2, .add_rows = add_rows<Q2>},
      .q3 = {.matmul = matmul<Q3>, .decode = decode<Q3>, .encode = encode_q3},
      .quantize_rows = quantize_rows,
      .add = add_to,
      .multiply = multiply,
      .raise = raise,
      .scale = scale,
      .relu = relu,
      .relu_squared = relu_squared,
      .gelu_tanh = gelu_tanh,
      .gelu_erf = gelu_erf,
      .swiglu = swiglu,
      .swiglu_clamped = swiglu_clamped,
      .geglu = geglu,
      .sigmoid_gate = sigmoid_gate,
      .softcap = softcap,
      .clamp = clamp,
      .xielu = xielu,
      .layer_norm = layer_norm,
      .rms_norm = rms_norm,
      .argmax = argmax,
      .exponentiate = exponentiate,
      .merge_sums = merge_sums,
      .merge_parts = merge_parts,
      .weights_of = weights_of,
      .mix = mix,
      .weigh = weigh,
      .add_weighed = add_weighed,
      .lowest = lowest,
      .rotate = rotate,
      .convolve = convolve,
      .normalize = normalize,
      .delta_rule = delta_rule,
      .scan = scan_states,
  };
  for (const Int8Kernels& int8 : kInt8) {
    TypeKernels& type = kernels.*int8.type;
    type.int8_matmul = int8.int8_matmul;
    type.interleaved_matmul = int8.interleaved_matmul;
    type.int8_group = int8.group;
  }
  return kernels;
}

}  // namespace
}  // namespace h2o
