// Copies from the host that go on beside the kernels.
#pragma once

#include <span>

#include "backend/backend.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// A second stream, and two events at which it and that of the kernels wait for each other.
class AsyncCopy {
 public:
  explicit AsyncCopy(const Stream& kernels);
  AsyncCopy(const AsyncCopy&) = delete;
  AsyncCopy& operator=(const AsyncCopy&) = delete;
  ~AsyncCopy();

  // The copies begin when the kernels launched so far have ended. From pinned memory.
  void begin(std::span<const HostCopy> copies) const;

  // Kernels launched from now on begin when those copies have ended.
  void await() const;

 private:
  const Stream& kernels_;
  const Stream copies_;
  cudaEvent_t launched_ = nullptr;
  cudaEvent_t copied_ = nullptr;
};

}  // namespace h2o::cuda
