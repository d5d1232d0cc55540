// Products in bf16 for x86-64-v4 with VNNI and BF16. This unit exports one table and nothing else.
#include "cpu/matmul/bf16_matmul-inl.h"

namespace h2o {
extern const ProductKernels kernels_x86_64_v4_bf16;
const ProductKernels kernels_x86_64_v4_bf16 = {.isa = "x86_64_v4_bf16",
                                               .round_rows = round_rows,
                                               .f16 = bf16_matmul<F16>,
                                               .bf16 = bf16_matmul<BF16>};
}  // namespace h2o
