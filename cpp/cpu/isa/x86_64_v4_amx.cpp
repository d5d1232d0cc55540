// The kernels for x86-64-v4 with VNNI, BF16 and AMX. This unit exports one table and nothing else.
#include "cpu/bf16_avx512.h"
#include "cpu/dot_avx512_vnni.h"
// After the vector type it is written against:
#include "cpu/kernels-inl.h"
// And with what it shares with kernels-inl.h:
#include "cpu/amx_matmul-inl.h"

namespace h2o {
extern const CpuKernels kernels_x86_64_v4_amx;
const CpuKernels kernels_x86_64_v4_amx = with_amx(kernels_for("x86_64_v4_amx"));
}  // namespace h2o
