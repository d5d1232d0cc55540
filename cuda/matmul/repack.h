// Uploads weights to the device.
#pragma once

#include <array>
#include <cstdint>

#include "core/buffer.h"
#include "core/tensor.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// Row stride on the device: see cuda/matmul/formats.cuh.
int64_t device_row_bytes(DType dtype, int64_t cols);

// Copies tensors to the device and converts quantized ones to the device layout. Reading the host's
// data, possibly from disk, overlaps with copying.
class Uploader {
 public:
  explicit Uploader(const Stream& stream);
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;
  ~Uploader();

  // to: [host.rows, device_row_bytes] on the device, or pinned. host.data may change afterwards.
  void upload(std::byte* to, const Tensor& host);

 private:
  struct Stage {
    Buffer pinned;
    Buffer device;
    cudaEvent_t free = nullptr;  // signalled when the device has read the buffer
  };

  const Stream& stream_;
  std::array<Stage, 2> stages_;
};

}  // namespace h2o::cuda
