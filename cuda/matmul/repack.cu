#include <algorithm>

#include "cuda/matmul/formats.cuh"
#include "cuda/matmul/repack.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/parallel_copy.h"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kStageBytes = int64_t{8} << 20;

// Repacks n blocks from block `first` of a matrix with n_groups per row. One group per thread. Does
// not let the next kernel start early, because it may read weights immediately.
template <class Format>
__global__ void __launch_bounds__(kThreads)
    repack_kernel(std::byte* to, int64_t row_bytes, int n_groups,
                  const typename Format::Block* blocks, int64_t first, int64_t n) {
  wait_for_previous();
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t block = index / Format::kBlockGroups;
  if (block >= n) return;
  const int64_t group = first * Format::kBlockGroups + index;
  Format::store(to + group / n_groups * row_bytes, n_groups, static_cast<int>(group % n_groups),
                blocks[block]);
}

}  // namespace

int64_t device_row_bytes(DType dtype, int64_t cols) {
  if (!is_quantized(dtype)) return byte_size(dtype, cols);
  return with_format(dtype, [&]<class Format>() { return Format::row_bytes(cols / kGroup); });
}

Uploader::Uploader(const Stream& stream) : stream_(stream) {
  for (Stage& stage : stages_) {
    stage.pinned = allocate_pinned(kStageBytes);
    stage.device = allocate_device(kStageBytes);
    check(cudaEventCreateWithFlags(&stage.free, cudaEventDisableTiming), "create an event");
  }
}

Uploader::~Uploader() {
  for (const Stage& stage : stages_) {
    if (stage.free != nullptr) cudaEventDestroy(stage.free);
  }
}

void Uploader::upload(std::byte* to, const Tensor& host) {
  const DTypeInfo& layout = info(host.dtype);
  const int64_t n_blocks = host.rows * host.cols / layout.block_size;
  const int64_t of_stage = kStageBytes / layout.block_bytes;
  const int64_t row_bytes = device_row_bytes(host.dtype, host.cols);
  int64_t round = 0;
  for (int64_t first = 0; first < n_blocks; first += of_stage, ++round) {
    const Stage& stage = stages_[round % 2];
    const int64_t n = std::min(of_stage, n_blocks - first);
    const auto bytes = static_cast<size_t>(n * layout.block_bytes);
    check(cudaEventSynchronize(stage.free), "upload");
    parallel_copy(stage.pinned.data(), host.data + first * layout.block_bytes, bytes);
    std::byte* const there =
        is_quantized(host.dtype) ? stage.device.data() : to + first * layout.block_bytes;
    check(cudaMemcpyAsync(there, stage.pinned.data(), bytes, cudaMemcpyDefault, stream_.get()),
          "upload");
    if (is_quantized(host.dtype)) {
      with_format(host.dtype, [&]<class Format>() {
        const int64_t threads = n * Format::kBlockGroups;
        launch(stream_, repack_kernel<Format>,
               static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, to,
               row_bytes, static_cast<int>(host.cols / kGroup),
               reinterpret_cast<const typename Format::Block*>(there), first, n);
      });
    }
    check(cudaEventRecord(stage.free, stream_.get()), "upload");
  }
}

}  // namespace h2o::cuda
