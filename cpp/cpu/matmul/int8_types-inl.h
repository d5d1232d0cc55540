// The products in 8-bit integers of every quantized type (see int8_matmul-inl.h), compiled once per
// instruction set: as a part of CpuKernels, or alone.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/int8_matmul-inl.h"
#include "cpu/matmul/interleaved_codebooks-inl.h"
#include "cpu/matmul/superblocks-inl.h"

namespace h2o {
namespace {

// nullptr for one lane, where interleaving columns gains nothing. Interleaved: the type's blocks,
// if they differ from those of the file.
template <class Type, class Interleaved = Type>
constexpr Int8Kernels int8_kernels(TypeKernels CpuKernels::* type) {
  Int8Kernels kernels{type, int8_matmul<Type, false>, nullptr, Type::kGroup};
  if constexpr (kWidth > 1) kernels.interleaved_matmul = int8_matmul<Interleaved, true>;
  return kernels;
}
template <class Type>
constexpr Int8Kernels codebook_kernels(TypeKernels CpuKernels::* type) {
  return int8_kernels<Type, InterleavedCodebook<Type>>(type);
}

constexpr Int8Kernels kInt8[] = {
    int8_kernels<Int8Q4_0>(&CpuKernels::q4_0),
    int8_kernels<Int8Q4_1>(&CpuKernels::q4_1),
    int8_kernels<Int8Q5_0>(&CpuKernels::q5_0),
    int8_kernels<Int8Q5_1>(&CpuKernels::q5_1),
    int8_kernels<Int8Q8_0>(&CpuKernels::q8_0),
    int8_kernels<Int8Q2_K>(&CpuKernels::q2_k),
    int8_kernels<Int8Q3_K>(&CpuKernels::q3_k),
    int8_kernels<Int8Q4_K>(&CpuKernels::q4_k),
    int8_kernels<Int8Q5_K>(&CpuKernels::q5_k),
    int8_kernels<Int8Q6_K>(&CpuKernels::q6_k),
    int8_kernels<Int8IQ4_NL>(&CpuKernels::iq4_nl),
    int8_kernels<Int8IQ4_XS>(&CpuKernels::iq4_xs),
    int8_kernels<Int8MXFP4>(&CpuKernels::mxfp4),
    codebook_kernels<Int8IQ1_S>(&CpuKernels::iq1_s),
    codebook_kernels<Int8IQ1_M>(&CpuKernels::iq1_m),
    codebook_kernels<Int8IQ2_XXS>(&CpuKernels::iq2_xxs),
    codebook_kernels<Int8IQ2_XS>(&CpuKernels::iq2_xs),
    codebook_kernels<Int8IQ2_S>(&CpuKernels::iq2_s),
    codebook_kernels<Int8IQ3_XXS>(&CpuKernels::iq3_xxs),
    codebook_kernels<Int8IQ3_S>(&CpuKernels::iq3_s),
    int8_kernels<Int8TQ1_0, Int8TQ2_0>(&CpuKernels::tq1_0),
    int8_kernels<Int8TQ2_0>(&CpuKernels::tq2_0),
    int8_kernels<Int8NVFP4, InterleavedNVFP4>(&CpuKernels::nvfp4),
};

// Alone.
constexpr ProductKernels int8_kernels_for(const char* isa) {
  return {.isa = isa,
          .quantize_rows = quantize_rows,
          .int8 = kInt8,
          .n_int8 = sizeof(kInt8) / sizeof(kInt8[0])};
}

}  // namespace
}  // namespace h2o
