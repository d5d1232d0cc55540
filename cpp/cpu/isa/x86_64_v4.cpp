// The kernels for x86-64-v4. This unit exports one table and nothing else.
#include "cpu/matmul/dot_avx512.h"
// After the vector type it is written against:
#include "cpu/kernels-inl.h"

namespace h2o {
extern const CpuKernels kernels_x86_64_v4;
const CpuKernels kernels_x86_64_v4 = kernels_for("x86_64_v4");
}  // namespace h2o
