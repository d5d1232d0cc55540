// The kernels for AArch64. This unit exports one table and nothing else.
#include "cpu/matmul/dot_neon.h"
// After the vector type it is written against:
#include "cpu/kernels-inl.h"

namespace h2o {
extern const CpuKernels kernels_neon;
const CpuKernels kernels_neon = kernels_for("neon");
}  // namespace h2o
