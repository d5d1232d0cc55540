// The CUDA runtime as the rest of the back end uses it: errors are exceptions, handles have owners.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "core/buffer.h"

namespace h2o::cuda {

// Throws OutOfMemory or DeviceError: "[cuda] operation: what CUDA says of it", in one sentence.
void check(cudaError_t error, const char* operation);

// What CUDA says of an error, and what to do about it where that is known.
std::string describe(cudaError_t error);

// Whether the environment has not set a variable to "0".
bool is_switched_on(const char* variable);

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
  // Compute capability 9 and later, unless H2O_CUDA_OVERLAP=0.
  bool overlaps_launches() const { return overlaps_launches_; }

  void synchronize() const;

 private:
  int device_;
  int n_multiprocessors_;
  bool overlaps_launches_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace h2o::cuda
