#include "cuda/matmul/gemm.cuh"

namespace h2o::cuda {

DType gemm_factors(DType weights) { return weights == DType::bf16 ? DType::bf16 : DType::f16; }

bool gemm_takes(const Weights& w) {
  const bool aligned = reinterpret_cast<uintptr_t>(w.data) % 16 == 0 && w.row_bytes % 16 == 0;
  return is_quantized(w.dtype) || (w.dtype != DType::f32 && aligned);
}

void gemm(const Stream& stream, const DeviceProduct& product, const void* x, int64_t n_rows,
          bool add) {
  const Gemm g{product, static_cast<const uint16_t*>(x), static_cast<int>(n_rows), add};
  if (g.w.dtype == DType::f16) {
    launch_gemm<Plain<false>>(stream, g);
  } else if (g.w.dtype == DType::bf16) {
    launch_gemm<Plain<true>>(stream, g);
  } else {
    gemm_quantized(stream, g);
  }
}

void gemm_experts(const Stream& stream, const DeviceProduct& product, const void* x, int64_t begin,
                  int64_t n_rows, const ExpertRows& experts) {
  const auto first = static_cast<int>(begin);
  const Gemm g{product, static_cast<const uint16_t*>(x), static_cast<int>(n_rows), false};
  if (g.w.dtype == DType::f16) {
    launch_experts_gemm<Plain<false>>(stream, g, experts, first);
  } else if (g.w.dtype == DType::bf16) {
    launch_experts_gemm<Plain<true>>(stream, g, experts, first);
  } else {
    gemm_quantized_experts(stream, g, experts, first);
  }
}

}  // namespace h2o::cuda
