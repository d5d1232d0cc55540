// Products in bf16 for x86-64-v4 with BF16 and AMX. This unit exports one table and nothing else.
#include "cpu/matmul/amx_bf16-inl.h"

namespace h2o {
extern const ProductKernels kernels_x86_64_v4_amx;
const ProductKernels kernels_x86_64_v4_amx = {.isa = "x86_64_v4_amx",
                                              .round_rows = round_rows,
                                              .f16 = amx_matmul<F16>,
                                              .bf16 = amx_matmul<BF16>};
}  // namespace h2o
