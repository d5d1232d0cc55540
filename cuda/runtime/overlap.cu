#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

// Compiled for the same architectures as all kernels.
__global__ void probe_kernel() {
  let_next_start();
  wait_for_previous();
}

}  // namespace

bool kernels_can_overlap() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe_kernel)),
        "find the kernels");
  return attributes.ptxVersion >= 90;
}

}  // namespace h2o::cuda
