// Products with weights in any type, and their rows as floats.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "backend/backend.h"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// A few rows are multiplied straight from the weights' blocks; more on tensor cores, by gemm() or,
// where they are many and it is found, by cuBLAS, a tile of unpacked weights at a time.
class Matmul {
 public:
  explicit Matmul(const Stream& stream);
  ~Matmul();

  std::string name() const;  // of what multiplies many rows: "cuBLAS 13.0" or "no cuBLAS"

  // The weights at `to` on the device, in rows of device_row_bytes() laid out for its kernels; the
  // workspace grows with them, for nothing is allocated later.
  Tensor upload(const Tensor& host, std::byte* to);

  // Of each product y = x w.weight^T + w.bias, or y += it, to the same bits as alone. Few rows take
  // one launch for as many products as have weights of one type.
  void multiply(std::span<const Product> products, const Tensor& x, bool add);

  // As Backend::matmul_gated in one launch, for few rows and weights that are not quantised: of
  // those the kernel that applies the gate rounds the result as well. False if it did nothing.
  bool multiply_gated(Gate kind, const Product& up, const Product& gate, const Tensor& x);

  // As Backend::matmul_experts: of each row as alone.
  void multiply_experts(std::span<const Product> products, const Tensor& x, const Routes& routes);

  // x[i] = table[tokens[i]]; tokens: [x.rows] on the device
  void embed(Tensor x, const Tensor& table, const int32_t* tokens);

  // What multiply() remembers of x, which may be written now.
  void forget();

  // The same, and where a kernel that writes y is to put it rounded too, since quantised weights
  // may be multiplied with it next. None if there are no such weights, or y has many rows.
  QuantizedRows rounded(const Tensor& y);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace h2o::cuda
