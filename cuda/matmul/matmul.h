// Products with weights of all types, and token embedding.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "backend/backend.h"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// A few rows are multiplied with the weights in their stored type; tens of rows with quantized
// weights by gemm_narrow(); more, and other types, by cuBLAS, with a tile of unpacked weights at a
// time. gemm() is for experts, and where cuBLAS is not found or cannot start.
class Matmul {
 public:
  explicit Matmul(const Stream& stream);
  ~Matmul();

  std::string name() const;  // the library for many rows: "cuBLAS 13.0" or "no cuBLAS"

  // Uploads weights to `to` on the device, in rows of device_row_bytes(), and grows the workspace
  // for them, so that nothing is allocated later.
  Tensor upload(const Tensor& host, std::byte* to);

  // Are up to kMatvecRows rows, from now on, bit-identical to computing each of them alone?
  void compute_alone(bool alone);

  // Computes each product y = x w.weight^T + w.bias, or adds it to y, bit-identical to computing it
  // alone. For few rows (tens with quantized weights), products with one type share a launch.
  void multiply(std::span<const Product> products, const Tensor& x, bool add);

  // Backend::matmul_gated in one launch, for few rows and weights that are not quantized: otherwise
  // the kernel that applies the gate also rounds the result. Returns false if not supported.
  bool multiply_gated(Gate kind, const Product& up, const Product& gate, const Tensor& x);

  // Backend::matmul_experts; each row is bit-identical to computing it alone.
  void multiply_experts(std::span<const Product> products, const Tensor& x, const Routes& routes);

  // x[i] = table[tokens[i]]; tokens: [x.rows] on the device
  void embed(Tensor x, const Tensor& table, const int32_t* tokens);

  // Memory for y as operands, which the operation that writes y should also write: weights may be
  // multiplied with it next. Empty if there are no such weights. `rounds`: can the operation round
  // to 8 bits? To be destroyed after that operation and before the next one.
  class NextOperands;
  NextOperands operands(const Tensor& y, bool rounds = true);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

class Matmul::NextOperands {
 public:
  NextOperands(State& state, const Operands& operands) : state_(state), operands_(operands) {}
  NextOperands(const NextOperands&) = delete;
  NextOperands& operator=(const NextOperands&) = delete;
  ~NextOperands();

  operator const Operands&() const { return operands_; }

 private:
  State& state_;
  Operands operands_;
};

}  // namespace h2o::cuda
