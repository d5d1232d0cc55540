// Kernel launches with programmatic dependent launch and dynamic shared memory.
#pragma once

#include <tuple>
#include <utility>

#include "cuda/runtime/device.h"

namespace h2o::cuda {

// Waits until all writes of preceding kernels are visible; see launch(). Every thread of every
// kernel calls it.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Allows the next kernel to launch, up to its own wait_for_previous(). Once all blocks have called
// it or ended: a kernel with more blocks than fit at once calls it when its work is nearly done, as
// blocks that wait would take the place of its own.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// The kernel's dynamic shared memory, 16-byte aligned.
template <class T>
__device__ inline T* dynamic_shared() {
  extern __shared__ __align__(16) std::byte shared[];
  return reinterpret_cast<T*>(shared);
}

// Dynamic part of the 48 KiB per block that need no opt-in; the rest is static.
constexpr size_t kSharedUnasked = 40 << 10;

// Runs kernel<<<grid, block, shared_bytes>>>(arguments...) on the stream.
//
// Where the device supports it, a kernel may start before the preceding one has ended. So every
// kernel of this back end calls wait_for_previous() before accessing data that other kernels read
// or write. Weights, which no kernel writes, may be read earlier. Weights of streamed layers are
// written by copies: a kernel does not start early across the event with which the stream waits for
// them.
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
  config.numAttrs = stream.can_overlap() ? 1 : 0;
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
