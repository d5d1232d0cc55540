// The kernels for x86-64-v3. This unit exports one table and nothing else.
#include "cpu/matmul/dot_avx2.h"
// After the vector type it is written against:
#include "cpu/kernels-inl.h"

namespace h2o {
extern const CpuKernels kernels_x86_64_v3;
const CpuKernels kernels_x86_64_v3 = kernels_for("x86_64_v3");
}  // namespace h2o
