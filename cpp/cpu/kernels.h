// CpuKernels: the inner loops of the CPU back end as a table of function pointers, one constant
// instance per instruction set. Included by units compiled for different instruction sets, so no
// function may be defined here: the linker would keep only one of the copies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/blocks.h"
#include "core/dtype.h"

namespace h2o {

// y[r, o] = sum_i x[r, i] * w[o, i] + bias[o], or y += that.
struct Matmul {
  float* y;            // [n_rows, y_stride]
  const float* x;      // [n_rows, n_in]
  const std::byte* w;  // [n_out, n_in], rows of w_row_bytes
  const float* bias;   // [n_out] or nullptr
  int64_t n_rows;
  int64_t n_in;
  int64_t w_row_bytes;
  int64_t y_stride;
  bool add;
  bool prefetches = true;      // see CpuKernels
  float* workspace = nullptr;  // nullptr, or kMatmulWorkspace floats aligned to 64 bytes
};
constexpr int64_t kMatmulWorkspace = 128 * 1024;

// Maximum number of rows of x rounded at once.
constexpr int64_t kRoundedRows = 512;

// Rows of x rounded to 8 bits: x[i] ~ scale * q[i], with a scale for every 32 elements and the sum
// of every `group` q's, in the layout that the kernels of one instruction set read.
struct Int8Rows {
  int8_t* q;       // [n_rows, n_in]
  float* scales;   // [n_rows, n_in / 32]
  int32_t* sums;   // [n_rows, n_in / group]
  int64_t n_rows;  // at most kRoundedRows
  int64_t n_in;
  int64_t group;
};

// Number of weight columns that are interleaved.
constexpr int64_t kInterleaved = 16;

// Limits of one call of int8_matmul, and the size of its workspace: a panel of weights, and the
// rows' sums over previous panels.
constexpr int64_t kInt8Depth = 512;
constexpr int64_t kInt8Columns = 32;
constexpr int64_t kInt8Group = 16;  // the smallest
constexpr int64_t kInt8Workspace =
    kInt8Columns * (kInt8Depth + kInt8Depth / kInt8Group * 8 + kRoundedRows * 4);

// Rows of x rounded to bf16, in the layout that the kernels of one instruction set read.
struct Bf16Rows {
  BF16* x;         // [kRoundedRows, n_in], both padded to a multiple of kBf16Block
  int64_t n_rows;  // at most kRoundedRows
  int64_t n_in;
};

// Limits of one call of bf16_matmul, and its workspace. Rows are rounded in groups of kBf16Block.
constexpr int64_t kBf16Block = 32;
constexpr int64_t kBf16Workspace = 544 * 1024;

// y[r, c] += sum_i p[r, i] * rows[i, c], i = 0 .. n_rows - 1 in order.
struct AddRows {
  float* y;               // [n_out, n]
  const float* p;         // [n_out, p_stride]
  const std::byte* rows;  // [n_rows, n], rows of row_bytes
  int64_t n_out;
  int64_t n_rows;
  int64_t n;
  int64_t row_bytes;
  int64_t p_stride;
};

constexpr int64_t kSplitRows = 16;
constexpr int64_t kSplitColumns = 32;

// y[r, c] = sum_i x[r, i] * column[c, i], or y += that. The order of each sum does not depend on
// the other rows and columns, nor on how it is divided at multiples of 32 terms.
struct SplitProduct {
  float* y;  // [n_rows, y_stride], of which multiples of kSplitColumns are written if they fit
  const float* x;     // [n_rows, x_stride]
  std::byte* staged;  // scratch of multiply_keys()
  int64_t n_rows;     // at most kSplitRows
  int64_t n_in;       // up to what is staged
  int64_t n_out;      // the first of n_columns
  int64_t n_columns;  // as staged
  int64_t x_stride;
  int64_t y_stride;
  bool add;
  std::byte* workspace;  // kSplitWorkspace bytes and kSplitRows rows of y, 64-byte aligned
};
constexpr int64_t kSplitWorkspace = 8 * 1024;

// Products of attention in bf16 with the accuracy of floats: each factor is the sum of two bf16,
// and the smallest of the four products is left out.
//
// Columns are staged first, for rows [n_rows, n] of the cache, in units that are 64-byte aligned
// and take split_bytes(n_rows, n). Elements of missing rows (nullptr) are zero.
struct SplitKernels {
  // y[r, j] = sum_i x[r, i] * rows[j, i] for n keys without staging them, which is faster for at
  // most kSplitRows rows of x; bit-identical. y_stride is at least n, rounded up to a multiple
  // of 16.
  void (*multiply_keys)(const SplitProduct& p, const std::byte* const* rows);
  // Stages keys for products with each row.
  void (*stage_keys)(std::byte* to, const std::byte* const* rows, int64_t n_rows, int64_t n);
  // Stages values for sums over rows. Returns false if a number is not finite: it times 0 is NaN.
  bool (*stage_values)(std::byte* to, const std::byte* const* rows, int64_t n_rows, int64_t n);
};
constexpr int64_t split_bytes(int64_t n_rows, int64_t n) {
  return (n_rows + 31) / 32 * 32 * ((n + 31) / 32 * 32) * 4;
}

// y[r, c] += sum_i p[r, i] * rows[i][c], i = 0 .. n_rows - 1 in order.
struct AddValues {
  float* y;                      // [n_out, n]
  const float* p;                // [n_out, p_stride]
  const std::byte* const* rows;  // [n_rows], each of n elements
  int64_t n_out;
  int64_t n_rows;
  int64_t n;
  int64_t p_stride;
};

// Products of attention with factors rounded to bf16, for heads of a multiple of 32 dimensions, at
// most kMostHeadDim. The order of each sum does not depend on other rows.
struct Bf16Attention {
  // Output columns [0, n): keys are m.w, queries x, one after another without padding; m.x is not
  // read, and there is no bias.
  void (*multiply_keys)(const Matmul& m, const Bf16Rows& x, int64_t n);
  // The result does not depend on how rows are divided at even indices.
  void (*add_values)(const AddValues& a);
};
constexpr int64_t kMostHeadDim = 256;

// Partial softmax, for each query: the largest logit so far, and the sum of e^(scale * (logit -
// largest)).
struct SoftmaxSums {
  float* largest;
  float* total;
};

// The sums of one query over n parts of the keys, `step` numbers apart, with the weighted sums.
struct SoftmaxParts {
  const float *largest, *total, *out;
  int64_t largest_step, total_step, out_step;
  int64_t n;
};

// Kernels for one element type.
struct TypeKernels {
  // Output columns [begin, end). The order of each sum does not depend on the range or the number
  // of rows. nullptr for most types that only weights have: decoded, they are of type f32.
  void (*matmul)(const Matmul& m, int64_t begin, int64_t end) = nullptr;
  // Multiplies m.x rounded to 8 bits: `x` points to the first of m's rows, a multiple of
  // row_multiple, but x.n_rows is the number of all rows that were rounded together. Bit-identical
  // on every instruction set.
  // `workspace`: kInt8Workspace bytes, 64-byte aligned. nullptr for types that are not quantized.
  void (*int8_matmul)(const Matmul& m, const Int8Rows& x, int64_t begin, int64_t end,
                      std::byte* workspace) = nullptr;
  // Bit-identical to int8_matmul, with weights interleaved by cpu/matmul/interleave.h; `begin` is a
  // multiple of kInterleaved. nullptr where it would be slower.
  void (*interleaved_matmul)(const Matmul& m, const Int8Rows& x, int64_t begin, int64_t end,
                             std::byte* workspace) = nullptr;
  int64_t int8_group = 0;  // x.group for both
  // y[n] = x[n], to and from float. encode is nullptr for read-only types.
  void (*decode)(float* y, const std::byte* x, int64_t n);
  void (*encode)(std::byte* y, const float* x, int64_t n) = nullptr;
  // nullptr if encode is.
  void (*add_rows)(const AddRows& a) = nullptr;
  // Multiplies m.x rounded to bf16, in `x`, and f16 weights rounded to bf16. `workspace`:
  // kBf16Workspace bytes, 64-byte aligned. nullptr for other types, and on instruction sets without
  // bf16 products.
  void (*bf16_matmul)(const Matmul& m, const Bf16Rows& x, int64_t begin, int64_t end,
                      std::byte* workspace) = nullptr;
  // For types whose interleaved blocks differ from those of the file: converts a block of the file,
  // and decodes n elements of such blocks. nullptr for other types.
  void (*unpack)(std::byte* to, const std::byte* block) = nullptr;
  void (*decode_unpacked)(float* y, const std::byte* x, int64_t n) = nullptr;
  // nullptr for types whose attention is not split, and on instruction sets without such products.
  const SplitKernels* split = nullptr;
  // nullptr for other types than f16 and bf16, and on instruction sets without such products.
  const Bf16Attention* bf16_attention = nullptr;
};

// Rows of n channels, before and after a causal convolution.
struct Convolution {
  float* x;              // [n_rows, stride]
  float* before;         // [n_taps - 1, stride] the rows before x; then the last ones of these
  const float* weights;  // [n_taps, stride]
  const float* bias;     // [n] or nullptr
  int64_t n_rows;
  int64_t n_taps;
  int64_t n;
  int64_t stride;
  bool silu;  // of the sums
};

// Rows of n_blocks * kDeltaColumns columns of one value head: see DeltaNet.
struct DeltaRule {
  float* state;        // [n_blocks, head_dim, kDeltaColumns]
  const float* q;      // [n_rows, stride]
  const float* k;      // [n_rows, stride]
  const float* v;      // [n_rows, stride]
  float* out;          // [n_rows, out_stride]
  const float* decay;  // [n_rows, n_v_heads]
  const float* beta;   // [n_rows, n_v_heads]
  int64_t n_rows;
  int64_t stride;
  int64_t out_stride;
  int64_t n_v_heads;
  int64_t head_dim;
  int64_t n_blocks;
};

// Rows of n_blocks * kDeltaColumns columns of one head: see StateSpace.
struct StateScan {
  float* state;        // [n_blocks, d_state, kDeltaColumns]
  const float* x;      // [n_rows, stride]
  const float* b;      // [n_rows, stride]
  const float* c;      // [n_rows, stride]
  float* out;          // [n_rows, out_stride]
  const float* decay;  // [n_rows, n_heads]
  const float* dt;     // [n_rows, n_heads]
  float d;
  int64_t n_rows;
  int64_t stride;
  int64_t out_stride;
  int64_t n_heads;
  int64_t d_state;
  int64_t n_blocks;
};

// Positions from `begin` to `end`, without those of a tail: see KvPolicy.
struct Evictable {
  int32_t begin, end;
  int32_t tail_begin, tail_end;
};

struct CpuKernels {
  const char* isa;
  int64_t row_multiple = 12;  // where rows rounded to 8 bits may be divided: of whole tiles
  // Are weights prefetched by software for a single row, where they are interleaved or bf16
  // products? Some processors are faster without.
  bool prefetches = true;
  TypeKernels f32, f16, bf16;
  TypeKernels q4_0, q4_1, q5_0, q5_1, q8_0;
  TypeKernels q2_k, q3_k, q4_k, q5_k, q6_k;
  TypeKernels iq4_nl, iq4_xs, mxfp4;
  TypeKernels iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s;
  TypeKernels tq1_0, tq2_0, nvfp4, q1_0, q2_0;
  TypeKernels q2, q3;

  // Rows [begin, end) of x [to.n_rows, to.n_in].
  void (*quantize_rows)(const Int8Rows& to, const float* x, int64_t begin, int64_t end);
  // The same; `begin` is a multiple of kBf16Block, and so is `end` unless it is to.n_rows. nullptr
  // if no type has a bf16_matmul.
  void (*round_rows)(const Bf16Rows& to, const float* x, int64_t begin, int64_t end) = nullptr;
  // nullptr if no type has SplitKernels.
  void (*multiply_split)(const SplitProduct& p) = nullptr;

  void (*add)(float* y, const float* x, int64_t n);                 // y += x
  void (*multiply)(float* y, const float* x, int64_t n);            // y *= x
  void (*raise)(float* y, const float* x, int64_t n);               // y = max(y, x); no NaN
  void (*scale)(float* x, int64_t n, float factor);                 // x *= factor
  void (*relu)(float* x, int64_t n);                                // x = max(x, 0)
  void (*relu_squared)(float* x, int64_t n);                        // x = max(x, 0)^2
  void (*gelu_tanh)(float* x, int64_t n);                           // see Backend::gelu_tanh
  void (*gelu_erf)(float* x, int64_t n);                            // see Backend::gelu_erf
  void (*swiglu)(float* up, const float* gate, int64_t n);          // see Gate::swiglu
  void (*swiglu_clamped)(float* up, const float* gate, int64_t n);  // see Gate::swiglu_clamped
  void (*geglu)(float* up, const float* gate, int64_t n);           // see Gate::geglu
  void (*sigmoid_gate)(float* up, const float* gate, int64_t n);    // see Gate::sigmoid
  void (*softcap)(float* x, int64_t n, float cap);                  // see Backend::softcap
  void (*clamp)(float* x, int64_t n, float limit);                  // see Backend::clamp
  void (*xielu)(float* x, int64_t n, float alpha_p, float alpha_n, float beta,
                float eps);  // see Backend::xielu
  void (*layer_norm)(float* y, const float* x, const float* weight, const float* bias, int64_t n,
                     float eps);  // weight, bias [n]
  void (*rms_norm)(float* y, const float* x, const float* weight, int64_t n, float eps);

  // The index of the largest element of x [n] (ties: the first); NaN sorts below every number.
  int64_t (*argmax)(const float* x, int64_t n);

  // Softmax in parts. x = e^(scale * (x - largest)), scale > 0; returns their sum. For any x,
  // `largest` is finite and the exponentials are between e^-70 and 1.
  float (*exponentiate)(float* x, int64_t n, float scale, float* largest);
  // Merges the sums of a part into those of the previous parts, for n queries. Outputs weighted by
  // the exponentials must then be combined as x = keep * x + take * (that of the part). The sums of
  // an empty part are -FLT_MAX and 0.
  void (*merge_sums)(const SoftmaxSums& to, const SoftmaxSums& part, float* keep, float* take,
                     int64_t n, float scale);
  // Merges one query's parts in order, with the outputs: out [n_out].
  void (*merge_parts)(const SoftmaxSums& to, float* out, const SoftmaxParts& parts, int64_t n_out,
                      float scale);
  // Factors that convert the exponentials of a part to probabilities, once all sums are known.
  void (*weights_of)(float* weights, const float* largest, const SoftmaxSums& all, int64_t n,
                     float scale);
  void (*mix)(float* y, const float* x, int64_t n, float keep, float take);  // see merge_sums
  // y = weight * y and y += weight * x for exponentials; probabilities are never denormal.
  void (*weigh)(float* y, int64_t n, float weight);
  void (*add_weighed)(float* y, const float* x, int64_t n, float weight);

  // Among evictable positions [n], the index of the one with the lowest importance (ties: the
  // largest position); -1 if there is none. Without importances (nullptr) all are equal.
  int64_t (*lowest)(const float* importances, const int32_t* positions, int64_t n,
                    const Evictable& evictable);

  // Rotates the pairs (x[2i], x[2i + 1]), or (x[i], x[i + n_rot / 2]), by the angles whose cosines
  // and then sines are in rope_table [n_rot].
  void (*rotate)(float* x, const float* rope_table, int64_t n_rot, bool pairs);

  // x = the sum over the taps, in place.
  void (*convolve)(const Convolution& c);
  void (*normalize)(float* x, int64_t n, float length);  // x *= length / sqrt(sum(x^2) + 1e-6)
  void (*delta_rule)(const DeltaRule& rule);
  void (*scan)(const StateScan& scan);

  const TypeKernels& of(DType dtype) const;

  // These kernels without the ones that round activations to 8 bits.
  CpuKernels in_float() const;
};

// The products of quantized weights of one type.
struct Int8Kernels {
  TypeKernels CpuKernels::* type;
  decltype(TypeKernels::int8_matmul) int8_matmul, interleaved_matmul;
  int64_t group;
};

// The split products of one type.
struct SplitType {
  TypeKernels CpuKernels::* type;
  SplitKernels kernels;
};

// Products that replace those of another unit's CpuKernels: in bf16, in 8-bit integers, or both,
// with the functions that round their rows; and those of attention.
struct ProductKernels {
  const char* isa;
  decltype(CpuKernels::round_rows) round_rows = nullptr;
  decltype(TypeKernels::bf16_matmul) f16 = nullptr, bf16 = nullptr;
  const Bf16Attention* f16_attention = nullptr;
  const Bf16Attention* bf16_attention = nullptr;
  decltype(CpuKernels::quantize_rows) quantize_rows = nullptr;
  int64_t row_multiple = CpuKernels{}.row_multiple;
  const Int8Kernels* int8 = nullptr;  // of every type whose rows have another layout
  int n_int8 = 0;
  decltype(CpuKernels::multiply_split) multiply_split = nullptr;
  const SplitType* split = nullptr;
  int n_split = 0;
};

}  // namespace h2o
