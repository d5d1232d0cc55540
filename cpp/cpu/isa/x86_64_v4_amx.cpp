// Products in bf16 for x86-64-v4 with BF16 and AMX. This unit exports one table and nothing else.
#include "cpu/matmul/amx_matmul-inl.h"

namespace h2o {
extern const Bf16Kernels kernels_x86_64_v4_amx;
const Bf16Kernels kernels_x86_64_v4_amx = {"x86_64_v4_amx", round_rows, amx_matmul<F16>,
                                           amx_matmul<BF16>};
}  // namespace h2o
