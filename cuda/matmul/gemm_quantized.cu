#include "cuda/matmul/gemm.cuh"
#include "cuda/matmul/gemm_quantized.h"

namespace h2o::cuda {

void gemm_quantized(const Stream& stream, const Gemm& g) {
  with_format(g.w.dtype, [&]<class Format>() { launch_gemm<Unpacked<Format>>(stream, g); });
}

}  // namespace h2o::cuda
