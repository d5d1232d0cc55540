#include "cuda/memory.h"

#include "core/error.h"
#include "cuda/device.h"

namespace h2o::cuda {

Buffer device_memory(size_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), text("allocate ", bytes, " bytes").c_str());
  return {data, bytes, [](void* p) noexcept { cudaFree(p); }};
}

Buffer pinned_memory(size_t bytes) {
  void* data = nullptr;
  check(cudaMallocHost(&data, bytes), text("allocate ", bytes, " bytes of the host").c_str());
  return {data, bytes, [](void* p) noexcept { cudaFreeHost(p); }};
}

}  // namespace h2o::cuda
