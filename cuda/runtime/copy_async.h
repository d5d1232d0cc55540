// Copies from the host that overlap with kernels.
#pragma once

#include <span>

#include "backend/backend.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// A second stream, and two events that synchronize it with the kernels' stream.
class AsyncCopy {
 public:
  explicit AsyncCopy(const Stream& kernels);
  AsyncCopy(const AsyncCopy&) = delete;
  AsyncCopy& operator=(const AsyncCopy&) = delete;
  ~AsyncCopy();

  // Starts copies from pinned memory after the kernels launched so far.
  void begin(std::span<const HostCopy> copies) const;

  // Kernels launched from now on wait for those copies.
  void await() const;

 private:
  const Stream& kernels_;
  const Stream copies_;
  cudaEvent_t launched_ = nullptr;
  cudaEvent_t copied_ = nullptr;
};

}  // namespace h2o::cuda
