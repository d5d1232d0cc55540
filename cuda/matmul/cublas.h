// cuBLAS, found when the program runs: one build serves machines with it and without.
#pragma once

#include <cstddef>
#include <string>

#include "core/buffer.h"
#include "core/dtype.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

class Cublas {
 public:
  // On this stream, with a workspace of its own: it allocates nothing later, so its calls can be
  // captured in a graph.
  explicit Cublas(const Stream& stream);
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas();

  // Whether there is one. Nothing else may be called if not, but name().
  explicit operator bool() const { return handle_ != nullptr; }

  std::string name() const;  // "cuBLAS 13.0" or "no cuBLAS"

  // y [n_rows, y_stride], of which n_out columns, = x [n_rows, n_in] w [n_out, n_in]^T, or y += it.
  // x and w are of one type: f16, bf16 or f32. Sums are f32.
  void multiply(float* y, int64_t y_stride, const void* x, const void* w, DType dtype,
                int64_t n_rows, int64_t n_out, int64_t n_in, bool add) const;

 private:
  Buffer workspace_;
  void* handle_ = nullptr;
};

}  // namespace h2o::cuda
