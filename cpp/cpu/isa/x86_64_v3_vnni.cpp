// Products in 8-bit integers for x86-64-v3 with AVX-VNNI. This unit exports one table and nothing
// else.
#include "cpu/matmul/dot_avx2_vnni.h"
// After the vector type it is written against:
#include "cpu/matmul/int8_types-inl.h"

namespace h2o {
extern const ProductKernels kernels_x86_64_v3_vnni;
const ProductKernels kernels_x86_64_v3_vnni = int8_kernels_for("x86_64_v3_vnni");
}  // namespace h2o
