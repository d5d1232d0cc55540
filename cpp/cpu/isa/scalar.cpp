// The kernels for any CPU. This unit exports one table and nothing else.
#include "cpu/simd/vec_scalar.h"
// After the vector type it is written against:
#include "cpu/kernels-inl.h"

namespace h2o {
extern const CpuKernels kernels_scalar;
const CpuKernels kernels_scalar = kernels_for("scalar");
}  // namespace h2o
