// Products in 8-bit integers for x86-64-v4 with AMX. This unit exports one table and nothing else.
#include "cpu/matmul/dot_avx512_vnni.h"
// After the vector type it is written against:
#include "cpu/matmul/amx_int8-inl.h"

namespace h2o {
namespace {

// All types with a group of 32.
constexpr Int8Kernels kInt8[] = {
    amx_int8_kernels<&CpuKernels::q4_0, Int8Q4_0>(),
    amx_int8_kernels<&CpuKernels::q4_1, Int8Q4_1>(),
    amx_int8_kernels<&CpuKernels::q5_0, Int8Q5_0>(),
    amx_int8_kernels<&CpuKernels::q5_1, Int8Q5_1>(),
    amx_int8_kernels<&CpuKernels::q8_0, Int8Q8_0>(),
    amx_int8_kernels<&CpuKernels::q4_k, Int8Q4_K>(),
    amx_int8_kernels<&CpuKernels::q5_k, Int8Q5_K>(),
    amx_int8_kernels<&CpuKernels::iq4_nl, Int8IQ4_NL>(),
    amx_int8_kernels<&CpuKernels::iq4_xs, Int8IQ4_XS>(),
    amx_int8_kernels<&CpuKernels::mxfp4, Int8MXFP4>(),
    amx_codebook_kernels<&CpuKernels::iq1_s, Int8IQ1_S>(),
    amx_codebook_kernels<&CpuKernels::iq2_xxs, Int8IQ2_XXS>(),
    amx_codebook_kernels<&CpuKernels::iq3_xxs, Int8IQ3_XXS>(),
    amx_codebook_kernels<&CpuKernels::iq3_s, Int8IQ3_S>(),
    amx_int8_kernels<&CpuKernels::tq1_0, Int8TQ1_0, Int8TQ2_0>(),
    amx_int8_kernels<&CpuKernels::tq2_0, Int8TQ2_0>(),
};

}  // namespace

extern const ProductKernels kernels_x86_64_v4_amx_int8;
const ProductKernels kernels_x86_64_v4_amx_int8 = {.isa = "x86_64_v4_amx_int8",
                                                   .quantize_rows = quantize_rows,
                                                   .row_multiple = kRowMultiple,
                                                   .int8 = kInt8,
                                                   .n_int8 = sizeof(kInt8) / sizeof(kInt8[0])};
}  // namespace h2o
