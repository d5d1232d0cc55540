// Weights on their way to the device.
#pragma once

#include <array>
#include <cstdint>

#include "core/buffer.h"
#include "core/tensor.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// From a row to the next on the device: see cuda/formats.cuh.
int64_t device_row_bytes(DType dtype, int64_t cols);

// Copies tensors to the device, and brings quantised ones into their order there. What is read
// from the host, perhaps from a disk, is copied on while the next is read.
class Uploader {
 public:
  explicit Uploader(const Stream& stream);
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;
  ~Uploader();

  // to: [host.rows, device_row_bytes] on the device, or pinned. The host's memory may change
  // afterwards.
  void upload(std::byte* to, const Tensor& host);

 private:
  struct Stage {
    Buffer pinned;
    Buffer device;
    cudaEvent_t free = nullptr;  // when the device has read what is in them
  };

  const Stream& stream_;
  std::array<Stage, 2> stages_;
};

}  // namespace h2o::cuda
