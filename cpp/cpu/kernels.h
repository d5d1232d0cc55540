// CpuKernels: the inner loops of the CPU back end as a table of function pointers, one constant
// instance per instruction set. Included by units compiled for different instruction sets, so
// nothing here may have a body: the linker would keep only one of its copies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/blocks.h"
#include "core/dtype.h"

namespace h2o {

// y[r, o] = sum_i x[r, i] * w[o, i] + bias[o], or y += it.
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
  float* workspace = nullptr;  // nullptr, or kMatmulWorkspace floats aligned to 64 bytes
};
constexpr int64_t kMatmulWorkspace = 128 * 1024;

// So many rows of x at most are rounded at once.
constexpr int64_t kRoundedRows = 512;

// Rows of x rounded to 8 bits: x[i] ~ scale * q[i], with a scale for every 32 elements and the sum
// of every `group` q's. In the order in which the kernels of one instruction set read them.
struct Int8Rows {
  int8_t* q;       // [n_rows, n_in]
  float* scales;   // [n_rows, n_in / 32]
  int32_t* sums;   // [n_rows, n_in / group]
  int64_t n_rows;  // at most kRoundedRows
  int64_t n_in;
  int64_t group;
};

// So many columns of weights lie side by side where they are interleaved.
constexpr int64_t kInterleaved = 16;

// The limits of one call of int8_matmul, and the workspace that it needs: a panel of weights, and
// sums of the rows over the panels before it.
constexpr int64_t kInt8Depth = 512;
constexpr int64_t kInt8Columns = 32;
constexpr int64_t kInt8Group = 16;  // the smallest
constexpr int64_t kInt8Workspace =
    kInt8Columns * (kInt8Depth + kInt8Depth / kInt8Group * 8 + kRoundedRows * 4);

// Rows of x rounded to bf16, in the order in which the kernels of one instruction set read them.
struct Bf16Rows {
  BF16* x;         // [kRoundedRows, n_in], of which either is padded to a multiple of kBf16Block
  int64_t n_rows;  // at most kRoundedRows
  int64_t n_in;
};

// The limits of one call of bf16_matmul, its workspace, and how many rows are rounded together.
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

// Of a softmax, for each of some queries: the largest logit so far, and the sum of the powers
// e^(scale * (logit - largest)).
struct SoftmaxSums {
  float* largest;
  float* total;
};

// The kernels that read or write one element type.
struct TypeKernels {
  // Output columns [begin, end). The sum of an output runs in the same order whatever the ranges
  // and the number of rows. nullptr for types that only weights have.
  void (*matmul)(const Matmul& m, int64_t begin, int64_t end);
  // The same with m.x rounded to 8 bits, in `x`: to the same bits on every instruction set.
  // `workspace` is kInt8Workspace bytes, aligned to 64. nullptr for types that are not quantised.
  void (*int8_matmul)(const Matmul& m, const Int8Rows& x, int64_t begin, int64_t end,
                      std::byte* workspace);
  // The same, to the same bits, with weights as cpu/matmul/interleave.h has them; `begin` is a
  // multiple of kInterleaved. nullptr also where it would be slower.
  void (*interleaved_matmul)(const Matmul& m, const Int8Rows& x, int64_t begin, int64_t end,
                             std::byte* workspace);
  int64_t int8_group;  // what both expect in x.group
  // y[n] = x[n], to and from float. encode is nullptr for types that are never written.
  void (*decode)(float* y, const std::byte* x, int64_t n);
  void (*encode)(std::byte* y, const float* x, int64_t n);
  // nullptr as encode is.
  void (*add_rows)(const AddRows& a);
  // As matmul, with m.x rounded to bf16, in `x`, and weights in f16 rounded so too. `workspace` is
  // kBf16Workspace bytes, aligned to 64. nullptr for other types, and for all types on instruction
  // sets without such products.
  void (*bf16_matmul)(const Matmul& m, const Bf16Rows& x, int64_t begin, int64_t end,
                      std::byte* workspace) = nullptr;
  // Where interleaved blocks are not those of the file: makes one of a block of the file, and reads
  // n elements of such blocks. nullptr for other types.
  void (*unpack)(std::byte* to, const std::byte* block) = nullptr;
  void (*decode_unpacked)(float* y, const std::byte* x, int64_t n) = nullptr;
};

struct CpuKernels {
  const char* isa;
  TypeKernels f32, f16, bf16;
  TypeKernels q4_0, q4_1, q5_0, q5_1, q8_0;
  TypeKernels q2_k, q3_k, q4_k, q5_k, q6_k;
  TypeKernels iq4_nl, iq4_xs, mxfp4;
  TypeKernels iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s;
  TypeKernels tq1_0, tq2_0, nvfp4;

  // Rows [begin, end) of x [to.n_rows, to.n_in].
  void (*quantize_rows)(const Int8Rows& to, const float* x, int64_t begin, int64_t end);
  // The same, `begin` a multiple of kBf16Block and `end` too, or to.n_rows. nullptr where no type
  // has a bf16_matmul.
  void (*round_rows)(const Bf16Rows& to, const float* x, int64_t begin, int64_t end) = nullptr;

  void (*add)(float* y, const float* x, int64_t n);                 // y += x
  void (*scale)(float* x, int64_t n, float factor);                 // x *= factor
  void (*relu)(float* x, int64_t n);                                // x = max(x, 0)
  void (*gelu_tanh)(float* x, int64_t n);                           // as Backend::gelu_tanh
  void (*gelu_erf)(float* x, int64_t n);                            // as Backend::gelu_erf
  void (*swiglu)(float* up, const float* gate, int64_t n);          // as Gate::swiglu
  void (*swiglu_clamped)(float* up, const float* gate, int64_t n);  // as Gate::swiglu_clamped
  void (*geglu)(float* up, const float* gate, int64_t n);           // as Gate::geglu
  void (*softcap)(float* x, int64_t n, float cap);                  // as Backend::softcap
  void (*layer_norm)(float* y, const float* x, const float* weight, const float* bias, int64_t n,
                     float eps);  // weight, bias [n]
  void (*rms_norm)(float* y, const float* x, const float* weight, int64_t n, float eps);

  // The index of the largest of x [n], the first of equals; NaN is less than every number.
  int64_t (*argmax)(const float* x, int64_t n);

  // Softmax over keys that come in parts. x = e^(scale * (x - largest)), scale > 0; returns their
  // sum. Whatever x was, largest is finite and the powers are from e^-70 to 1.
  float (*powers)(float* x, int64_t n, float scale, float* largest);
  // Adds the sums of a part to those of the parts before, for n queries. What was multiplied by
  // powers is then x = keep * x + take * (that of the part). -FLT_MAX and 0 are the sums of
  // nothing.
  void (*merge_sums)(const SoftmaxSums& to, const SoftmaxSums& part, float* keep, float* take,
                     int64_t n, float scale);
  // What turns powers of a part into probabilities, once the sums of all parts are known.
  void (*weights_of)(float* weights, const float* largest, const SoftmaxSums& all, int64_t n,
                     float scale);
  void (*mix)(float* y, const float* x, int64_t n, float keep, float take);  // see merge_sums
  // y = weight * y and y += weight * x for powers; no probability is denormal.
  void (*weigh)(float* y, int64_t n, float weight);
  void (*add_weighed)(float* y, const float* x, int64_t n, float weight);

  // Of the positions [n] from `begin` to `end` - 1 the index of the one with the lowest importance,
  // of equals the largest position; -1 if there is none. Without importances (nullptr) all are
  // equal.
  int64_t (*lowest)(const float* importances, const int32_t* positions, int64_t n, int32_t begin,
                    int32_t end);

  // Turns the pairs (x[2i], x[2i + 1]), or (x[i], x[i + n_rot / 2]), by the angles whose cosines
  // and then sines are in rope_table [n_rot].
  void (*rotate)(float* x, const float* rope_table, int64_t n_rot, bool pairs);

  const TypeKernels& of(DType dtype) const;
};

// Products in bf16, of units that complete a CpuKernels by them: its round_rows, and the
// bf16_matmul of weights in f16 and in bf16.
struct Bf16Kernels {
  const char* isa;
  decltype(CpuKernels::round_rows) round_rows;
  decltype(TypeKernels::bf16_matmul) f16, bf16;
};

}  // namespace h2o
