#include "cuda/matmul/gemm.cuh"

namespace h2o::cuda {

void gemm_quantized(const Stream& stream, const Gemm& g) {
  with_format(g.w.dtype, [&]<class Format>() { launch_gemm<Unpacked<Format>>(stream, g); });
}

void gemm_quantized_experts(const Stream& stream, const Gemm& g, const ExpertRows& experts,
                            int begin) {
  with_format(g.w.dtype, [&]<class Format>() {
    launch_experts_gemm<Unpacked<Format>>(stream, g, experts, begin);
  });
}

}  // namespace h2o::cuda
