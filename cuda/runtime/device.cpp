#include "cuda/runtime/device.h"

#include "core/error.h"

namespace h2o::cuda {

void check(cudaError_t error, const char* operation) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that is not sticky shall not be found again
  const std::string message = text("[cuda] ", operation, ": ", cudaGetErrorString(error));
  if (error == cudaErrorMemoryAllocation) throw OutOfMemory(message);
  throw DeviceError(message);
}

Buffer allocate_device(size_t bytes) {
  if (bytes == 0) return {};
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw OutOfMemory(text("[cuda] cannot allocate ", bytes, " bytes on the device: ", free, " of ",
                           total, " are free"));
  }
  check(error, "allocate");
  return {data, bytes, [](void* p) noexcept { cudaFree(p); }};
}

Buffer allocate_pinned(size_t bytes) {
  if (bytes == 0) return {};
  void* data = nullptr;
  const cudaError_t error = cudaMallocHost(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw OutOfMemory(text("[cuda] cannot pin ", bytes, " bytes of the host's memory"));
  }
  check(error, "allocate on the host");
  return {data, bytes, [](void* p) noexcept { cudaFreeHost(p); }};
}

Stream::Stream(int device) : device_(device) {
  check(cudaSetDevice(device), "choose the device");
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device");
  check(cudaDeviceGetAttribute(&n_multiprocessors_, cudaDevAttrMultiProcessorCount, device),
        "device");
  overlaps_launches_ = major >= 9;
  // Not the default stream: two back ends of a process do not wait for each other.
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream");
}

Stream::~Stream() { cudaStreamDestroy(stream_); }

void Stream::synchronize() const { check(cudaStreamSynchronize(stream_), "wait for the device"); }

}  // namespace h2o::cuda
