// The kernels for x86-64-v4 with VNNI and BF16. This unit exports one table and nothing else.
#include "cpu/bf16_avx512.h"
#include "cpu/dot_avx512_vnni.h"
// After the vector type it is written against:
#include "cpu/kernels-inl.h"
// And with what it shares with kernels-inl.h:
#include "cpu/bf16_matmul-inl.h"

namespace h2o {
extern const CpuKernels kernels_x86_64_v4_bf16;
const CpuKernels kernels_x86_64_v4_bf16 = with_bf16(kernels_for("x86_64_v4_bf16"));
}  // namespace h2o
