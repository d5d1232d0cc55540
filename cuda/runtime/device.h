// The CUDA runtime with exceptions and RAII handles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/buffer.h"

namespace h2o::cuda {

// Throws OutOfMemory or DeviceError: "[cuda] operation: CUDA's error message".
void check(cudaError_t error, const char* operation);

// CUDA's message for an error, with advice where it is known.
std::string describe(cudaError_t error);

// True unless the environment variable is "0".
bool is_switched_on(const char* variable);

// Uninitialized memory of the current device, and pinned host memory. Throws OutOfMemory, with the
// numbers.
Buffer allocate_device(size_t bytes);
Buffer allocate_pinned(size_t bytes);

// True if kernels of this build wait for preceding ones on the current device: if they were
// compiled for compute capability 9.0 or later. Kernels that the driver compiled from older PTX do
// not wait. Throws DeviceError if this build has no kernels for the device.
bool kernels_can_overlap();

class Stream {
 public:
  explicit Stream(int device);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();

  // The handle, for enqueuing an operation.
  cudaStream_t get() const {
    ++n_uses_;
    return stream_;
  }
  // Changes with every operation that is enqueued.
  uint64_t n_uses() const { return n_uses_; }
  int device() const { return device_; }
  int n_multiprocessors() const { return n_multiprocessors_; }
  // Launches overlap: compute capability 9 and later, unless H2O_CUDA_OVERLAP=0.
  bool can_overlap() const { return can_overlap_; }

  void synchronize() const;

 private:
  int device_;
  int n_multiprocessors_;
  bool can_overlap_;
  cudaStream_t stream_ = nullptr;
  mutable uint64_t n_uses_ = 0;
};

}  // namespace h2o::cuda
