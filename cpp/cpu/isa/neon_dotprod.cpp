// Products in 8-bit integers for AArch64 with dot products. This unit exports one table and nothing
// else.
#include "cpu/matmul/dot_neon_dotprod.h"
// After the vector type it is written against:
#include "cpu/matmul/int8_types-inl.h"

namespace h2o {
extern const ProductKernels kernels_neon_dotprod;
const ProductKernels kernels_neon_dotprod = int8_kernels_for("neon_dotprod");
}  // namespace h2o
