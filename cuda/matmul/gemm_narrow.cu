#include <algorithm>

#include "cuda/matmul/gemm_narrow.h"
#include "cuda/matmul/narrow_worker.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

constexpr int kLeastTurns =
    8;                      // of a split: with fewer, writing sums takes as long as reading weights
constexpr int kBlocks = 2;  // per multiprocessor

// True in the last of a tile's splits that has written its sums, which then sees those of all.
__device__ inline bool is_last(int* n_done, int n_splits) {
  __shared__ bool is;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is = atomicAdd(n_done, 1) == n_splits - 1;
    if (is) *n_done = 0;  // for the next launch
  }
  __syncthreads();
  __threadfence();
  return is;
}

template <class Format>
__global__ void __launch_bounds__(kThreads, kBlocks) gemm_narrow_kernel(NarrowGemm g) {
  constexpr int kAhead = Stage<Format>::kCount - 1;
  std::byte* const shared = dynamic_shared<std::byte>();
  const NarrowPart part = part_of(g.parts, blockIdx.y);
  const auto block = static_cast<int>(blockIdx.y - part.first_block);
  const int tile = block / part.n_splits, split = block % part.n_splits;
  const int first_row = blockIdx.x * kRows, first_turn = split * part.n_turns;
  const int64_t first_out = int64_t{tile} * kOuts;
  Worker<Format> worker(g, part, first_row, first_out, first_turn, shared);
  const int n_turns = min(part.n_turns, g.n_turns() - first_turn);
  for (int turn = 0; turn < kAhead; ++turn) worker.copy_weights();
  wait_for_previous();
  for (int turn = 0; turn < kAhead; ++turn) {
    if (turn < n_turns) worker.copy_x();
    commit_copies();
  }
  for (int turn = 0; turn < n_turns; ++turn) {
    wait_for_copies<kAhead - 1>();
    __syncthreads();  // this turn has been copied, and no thread reads the previous one
    if (turn + kAhead < n_turns) {
      worker.copy_weights();
      worker.copy_x();
    }
    commit_copies();
    worker.multiply();
  }
  let_next_start();
  __syncthreads();  // no thread reads the last stage
  auto* const sums = reinterpret_cast<float*>(shared);
  worker.store(sums);
  __syncthreads();

  const int own = threadIdx.x % kOuts;
  const auto each_row = [&](const auto& body) {
    const int n_rows = min(kRows, g.n_rows - first_row);
    for (int row = threadIdx.x / kOuts; row < n_rows; row += kThreads / kOuts) body(row);
  };
  const auto of_shares = [&](int row) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kShares; ++i) sum += sums[(i * kRows + row) * kSumStride + own];
    return sum;
  };
  const auto write = [&](int row, float sum) {
    const int64_t out = first_out + own;
    if (out >= part.rows) return;
    float* const y = part.y + int64_t{first_row + row} * part.rows + out;
    if (part.bias != nullptr) sum += part.bias[out];
    *y = g.add ? *y + sum : sum;
  };
  if (part.n_splits == 1) return each_row([&](int row) { write(row, of_shares(row)); });
  const int first_sums = part.first_sums + (tile * gridDim.x + blockIdx.x) * part.n_splits;
  const auto of_split = [&](int i, int row) -> float& {
    return g.sums[(int64_t{first_sums + i} * kRows + row) * kOuts + own];
  };
  each_row([&](int row) { of_split(split, row) = of_shares(row); });
  if (!is_last(g.n_done + first_sums, part.n_splits)) return;
  each_row([&](int row) {
    float sum = 0;
    for (int i = 0; i < part.n_splits; ++i) sum += of_split(i, row);
    write(row, sum);
  });
}

// Blocks that fit on the device at once.
int n_places(const Stream& stream) { return kBlocks * stream.n_multiprocessors(); }

}  // namespace

bool gemm_narrow_takes(DType dtype) {
  return is_quantized(dtype) &&
         with_format(dtype, [&]<class Format>() { return Format::Scales::kInHalves; });
}

// Each product of a launch has at most n_places() blocks that are splits.
size_t gemm_narrow_workspace(const Stream& stream) {
  return size_t{kMaxProducts} * n_places(stream) * (1 + kRows * kOuts) * sizeof(float);
}

void gemm_narrow(const Stream& stream, std::span<const DeviceProduct> products, const void* x,
                 int64_t n_rows, bool add, std::byte* workspace) {
  const Weights& first = products.front().w;
  auto* const n_done = reinterpret_cast<int*>(workspace);
  NarrowGemm g{{},
               static_cast<const uint16_t*>(x),
               first.cols,
               first.row_bytes,
               static_cast<int>(n_rows),
               add,
               n_done,
               reinterpret_cast<float*>(n_done + kMaxProducts * n_places(stream))};
  const int row_tiles = (g.n_rows + kRows - 1) / kRows;
  unsigned n_blocks = 0;
  int n_sums = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    const auto& [y, bias, w] = products[i];
    const auto n_tiles = static_cast<int>((w.rows + kOuts - 1) / kOuts);
    const int most = std::max(g.n_turns() / kLeastTurns, 1);
    const int wanted = std::clamp(n_places(stream) / (n_tiles * row_tiles), 1, most);
    const int n_turns = (g.n_turns() + wanted - 1) / wanted;
    const int n_splits = (g.n_turns() + n_turns - 1) / n_turns;
    g.parts[i] = {{y, bias, w.data, w.rows, n_blocks}, n_splits, n_turns, n_sums};
    n_blocks += static_cast<unsigned>(n_tiles * n_splits);
    if (n_splits > 1) n_sums += n_tiles * row_tiles * n_splits;
  }
  const dim3 grid(static_cast<unsigned>(row_tiles), n_blocks);
  with_format(first.dtype, [&]<class Format>() {
    if constexpr (Format::Scales::kInHalves) {
      launch(stream, gemm_narrow_kernel<Format>, grid, dim3(kThreads), Stage<Format>::kSharedBytes,
             g);
    }
  });
}

}  // namespace h2o::cuda
