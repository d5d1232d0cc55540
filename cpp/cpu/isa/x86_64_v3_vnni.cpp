// The kernels for x86-64-v3 with AVX-VNNI. This unit exports one table and nothing else.
#include "cpu/matmul/dot_avx2_vnni.h"
// After the vector type it is written against:
#include "cpu/kernels-inl.h"

namespace h2o {
extern const CpuKernels kernels_x86_64_v3_vnni;
const CpuKernels kernels_x86_64_v3_vnni = kernels_for("x86_64_v3_vnni");
}  // namespace h2o
