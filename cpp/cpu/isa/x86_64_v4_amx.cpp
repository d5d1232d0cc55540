// Products in bf16 for x86-64-v4 with BF16 and AMX. This unit exports one table and nothing else.
#include "cpu/attention/split_amx-inl.h"
#include "cpu/matmul/amx_bf16-inl.h"

namespace h2o {
namespace {

// Types of caches that are not wider than two bf16.
constexpr SplitType kSplit[] = {
    {&CpuKernels::f16, split_kernels<Plain<F16>>()},
    {&CpuKernels::bf16, split_kernels<Plain<BF16>>()},
    {&CpuKernels::q8_0, split_kernels<Q8_0>()},
    {&CpuKernels::q5_0, split_kernels<Q5_0>()},
    {&CpuKernels::q4_0, split_kernels<Q4_0>()},
};

}  // namespace

extern const ProductKernels kernels_x86_64_v4_amx;
const ProductKernels kernels_x86_64_v4_amx = {.isa = "x86_64_v4_amx",
                                              .round_rows = round_rows,
                                              .f16 = amx_matmul<F16>,
                                              .bf16 = amx_matmul<BF16>,
                                              .multiply_split = multiply_split,
                                              .split = kSplit,
                                              .n_split = sizeof(kSplit) / sizeof(kSplit[0])};
}  // namespace h2o
