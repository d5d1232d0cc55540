// Copies from the host that go on beside the kernels.
#pragma once

#include <span>

#include "core/backend.h"
#include "cuda/device.h"

namespace h2o::cuda {

// A second stream, and two events at which it and that of the kernels wait for each other.
class CopyAhead {
 public:
  explicit CopyAhead(const Stream& kernels);
  CopyAhead(const CopyAhead&) = delete;
  CopyAhead& operator=(const CopyAhead&) = delete;
  ~CopyAhead();

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
