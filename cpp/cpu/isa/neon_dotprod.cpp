// The kernels for AArch64 with dot products. This unit exports one table and nothing else.
#include "cpu/matmul/dot_neon_dotprod.h"
// After the vector type it is written against:
#include "cpu/kernels-inl.h"

namespace h2o {
extern const CpuKernels kernels_neon_dotprod;
const CpuKernels kernels_neon_dotprod = kernels_for("neon_dotprod");
}  // namespace h2o
