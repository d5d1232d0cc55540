#include <algorithm>
#include <climits>

#include "cuda/matmul/gemm_narrow.h"
#include "cuda/matmul/narrow_worker.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

// Waits for all turns' copies except for those of the last n.
__device__ inline void wait_for_turns(int n) {
  if (n == 1) return wait_for_copies<1>();
  if (n == 2) return wait_for_copies<2>();
  wait_for_copies<0>();
}

template <class Format>
__global__ void __launch_bounds__(kThreads, 2) gemm_narrow_kernel(NarrowGemm g) {
  std::byte* const shared = dynamic_shared<std::byte>();
  let_next_start();
  const NarrowPart part = g.part_of(blockIdx.y);
  const int first_row = blockIdx.x * kRows;
  const int64_t first_out = int64_t{blockIdx.y - part.first_block} * kOuts;
  Worker<Format> worker(g, part, first_row, first_out, shared);
  const int n_turns = worker.n_turns(), n_ahead = worker.n_stages() - 1;
  for (int turn = 0; turn < n_ahead; ++turn) worker.copy_weights();
  wait_for_previous();
  for (int turn = 0; turn < n_ahead; ++turn) {
    if (turn < n_turns) worker.copy_x();
    commit_copies();
  }
  for (int turn = 0; turn < n_turns; ++turn) {
    wait_for_turns(n_ahead - 1);
    __syncwarp();  // this turn has been copied, and no lane reads the previous one
    if (turn + n_ahead < n_turns) {
      worker.copy_weights();
      worker.copy_x();
    }
    commit_copies();
    worker.multiply();
  }
  __syncwarp();  // no lane reads the last stage
  const auto sums_of = [&](int warp) {
    return reinterpret_cast<float*>(shared + warp * g.warp_bytes);
  };
  worker.store(sums_of(threadIdx.x / kWarp));
  __syncthreads();
  const int64_t out = first_out + threadIdx.x % kOuts;
  if (out >= part.rows) return;
  const int end = min(kRows, g.n_rows - first_row);
  for (int row = threadIdx.x / kOuts; row < end; row += kThreads / kOuts) {
    float* const y = part.y + int64_t{first_row + row} * part.rows + out;
    float sum = part.bias != nullptr ? part.bias[out] : 0;
    if (g.add) sum += *y;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += sums_of(warp)[row * kSumStride + threadIdx.x % kOuts];
    }
    *y = sum;
  }
}

}  // namespace

bool gemm_narrow_takes(DType dtype) {
  return is_quantized(dtype) &&
         with_format(dtype, [&]<class Format>() { return Format::Scales::kInHalves; });
}

void gemm_narrow(const Stream& stream, std::span<const Matvec> products, const void* x,
                 int64_t n_rows, bool add) {
  const Weights& first = products.front().w;
  const auto most = static_cast<int>(stream.most_shared()) / kWarps / kPiece * kPiece;
  NarrowGemm g{{},
               static_cast<const uint16_t*>(x),
               first.cols,
               first.row_bytes,
               static_cast<int>(n_rows),
               std::min(kWarpBytes, most),
               add};
  for (NarrowPart& part : g.parts) part.first_block = UINT_MAX;
  unsigned n_blocks = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    const auto& [y, bias, w] = products[i];
    g.parts[i] = {y, bias, w.data, w.rows, n_blocks};
    n_blocks += static_cast<unsigned>((w.rows + kOuts - 1) / kOuts);
  }
  const dim3 grid(static_cast<unsigned>((n_rows + kRows - 1) / kRows), n_blocks);
  with_format(first.dtype, [&]<class Format>() {
    if constexpr (Format::Scales::kInHalves) {
      launch(stream, gemm_narrow_kernel<Format>, grid, dim3(kThreads),
             static_cast<size_t>(kWarps * g.warp_bytes), g);
    }
  });
}

}  // namespace h2o::cuda
