#include "cuda/matmul/quantize_activations.h"
#include "cuda/matmul/round_group.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) round_kernel(QuantizedRows to, const float* x, int n) {
  let_next_start();
  wait_for_previous();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const int row = blockIdx.y;
  round_group(to, row, i / QuantizedRows::kGroup, i < n ? x[int64_t{row} * n + i] : 0);
}

}  // namespace

dim3 rounding_grid(const QuantizedRows& to, int64_t n_rows, int threads) {
  const int elements = to.n_chunks * QuantizedRows::kChunk * QuantizedRows::kGroup;
  return {static_cast<unsigned>(elements / threads), static_cast<unsigned>(n_rows)};
}

void quantize_rows(const Stream& stream, const QuantizedRows& to, const Tensor& x) {
  launch(stream, round_kernel, rounding_grid(to, x.rows, kThreads), dim3(kThreads), 0, to,
         x.floats(), static_cast<int>(x.cols));
}

}  // namespace h2o::cuda
