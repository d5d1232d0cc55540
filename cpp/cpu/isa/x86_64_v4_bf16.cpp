// Products in bf16 for x86-64-v4 with VNNI and BF16. This unit exports one table and nothing else.
#include "cpu/attention/bf16_attention-inl.h"
#include "cpu/matmul/bf16_matmul-inl.h"

namespace h2o {
namespace {

constexpr Bf16Attention kF16Attention = bf16_attention<F16>();
constexpr Bf16Attention kBf16Attention = bf16_attention<BF16>();

}  // namespace

extern const ProductKernels kernels_x86_64_v4_bf16;
const ProductKernels kernels_x86_64_v4_bf16 = {.isa = "x86_64_v4_bf16",
                                               .round_rows = round_rows,
                                               .f16 = bf16_matmul<F16>,
                                               .bf16 = bf16_matmul<BF16>,
                                               .f16_attention = &kF16Attention,
                                               .bf16_attention = &kBf16Attention};
}  // namespace h2o
