// The CUDA runtime as the rest of the back end uses it: errors are exceptions, handles have owners,
// and kernels are launched so that each may begin while the one before it ends.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <tuple>
#include <utility>

#include "core/buffer.h"

namespace h2o::cuda {

// Throws OutOfMemory or DeviceError: "[operation] what CUDA says of it".
void check(cudaError_t error, const char* operation);

// Memory of the current device, as it comes; and of the host, pinned, so that copies are fast.
// Throws OutOfMemory, with the numbers.
Buffer allocate_device(size_t bytes);
Buffer allocate_pinned(size_t bytes);

class Stream {
 public:
  explicit Stream(int device);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();

  cudaStream_t get() const { return stream_; }
  int device() const { return device_; }
  int n_multiprocessors() const { return n_multiprocessors_; }
  bool overlaps_launches() const { return overlaps_launches_; }  // compute capability 9 and later

  void synchronize() const;

 private:
  int device_;
  int n_multiprocessors_;
  bool overlaps_launches_;
  cudaStream_t stream_ = nullptr;
};

// Shared memory that a block gets without being asked for.
constexpr size_t kSharedUnasked = 48 << 10;

// Runs kernel<<<grid, block, shared_bytes>>>(arguments...) on the stream.
//
// Where the device can, the kernel may start before the kernel ahead of it has ended. So every
// kernel of this back end calls wait_for_previous() (cuda/reduce.cuh) before it reads or writes
// what other kernels write or read; what no kernel writes, weights, it may read before that.
template <class... Parameters, class... Arguments>
void launch(const Stream& stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            size_t shared_bytes, Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.get();
  config.attrs = &attribute;
  config.numAttrs = stream.overlaps_launches() ? 1 : 0;
  if (shared_bytes > kSharedUnasked) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "reserve shared memory");
  }
  std::tuple<Parameters...> values(std::forward<Arguments>(arguments)...);
  std::apply(
      [&](auto&... value) {
        void* pointers[] = {&value...};
        check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers),
              "launch");
      },
      values);
}

}  // namespace h2o::cuda
