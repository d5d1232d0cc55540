// cuBLAS, loaded at run time: one build supports machines with and without it.
#pragma once

#include <cstddef>
#include <string>

#include "core/buffer.h"
#include "core/dtype.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

class Cublas {
 public:
  // Uses this stream and its own workspace: it allocates nothing later, so its calls can be
  // captured.
  explicit Cublas(const Stream& stream);
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas();

  // True if cuBLAS was found and could start. Otherwise only name() may be called.
  explicit operator bool() const { return handle_ != nullptr; }

  // "cuBLAS 13.0", "no cuBLAS", or "no cuBLAS: " and why it could not start
  std::string name() const;

  // y = x w^T, or y += it: x [n_rows, n_in], w [n_out, n_in], y [n_rows, y_stride], whose first
  // n_out columns are written. x and w have the same type: f16, bf16 or f32. Sums are f32.
  void multiply(float* y, int64_t y_stride, const void* x, const void* w, DType dtype,
                int64_t n_rows, int64_t n_out, int64_t n_in, bool add) const;

  // Does as multiply(), and adds `bias` [n_out], in one kernel of cuBLASLt. Returns false, and has
  // written nothing, if that is not possible.
  bool multiply_biased(float* y, int64_t y_stride, const void* x, const void* w, DType dtype,
                       int64_t n_rows, int64_t n_out, int64_t n_in, const float* bias,
                       bool add) const;

 private:
  const Stream& stream_;
  Buffer workspace_;
  void* handle_ = nullptr;
  std::string problem_;
};

}  // namespace h2o::cuda
