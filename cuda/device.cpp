#include "cuda/device.h"

#include "core/error.h"

namespace h2o::cuda {

void check(cudaError_t error, const char* operation) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that is not sticky shall not be found again
  const std::string message = text("[cuda] ", operation, ": ", cudaGetErrorString(error));
  if (error == cudaErrorMemoryAllocation) throw OutOfMemory(message);
  throw DeviceError(message);
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
