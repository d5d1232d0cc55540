// Products in 8-bit integers for x86-64-v4 with VNNI. This unit exports one table and nothing else.
#include "cpu/matmul/dot_avx512_vnni.h"
// After the vector type it is written against:
#include "cpu/matmul/int8_types-inl.h"

namespace h2o {
extern const ProductKernels kernels_x86_64_v4_vnni;
const ProductKernels kernels_x86_64_v4_vnni = int8_kernels_for("x86_64_v4_vnni");
}  // namespace h2o
