// CpuMatmul: y = x w^T + bias on the threads of a pool, by the kernel of the weights' type.
#pragma once

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

namespace h2o {

class CpuMatmul {
 public:
  CpuMatmul(const CpuKernels& kernels, ThreadPool& pool);

  // Before a weight is multiplied the first time. Throws OutOfMemory.
  void reserve(const Tensor& weight);

  // y [n, n_out] = x [n, n_in] w^T + bias, with w [n_out, n_in]; or += if `add`.
  void operator()(const Tensor& y, const Tensor& x, const Affine& w, bool add);

  // Between products, of as many bytes at least as a row of a reserved weight.
  std::byte* scratch() { return rows_.data(); }

 private:
  void multiply_int8(const TypeKernels& type, decltype(type.int8_matmul) kernel, Matmul m,
                     int64_t n_out);
  void multiply_bf16(const TypeKernels& type, Matmul m, int64_t n_out);
  template <class Body>
  void for_tiles(const Matmul& m, int64_t n_out, const Body& body);
  template <class Body>
  void for_columns(const Matmul& m, int64_t n_out, const Body& body);
  Int8Rows int8_rows(int64_t n_rows, int64_t n_in, int64_t group) const;
  std::byte* panel(int thread);

  const CpuKernels& kernels_;
  ThreadPool& pool_;
  Buffer panels_;  // of each thread
  Buffer rows_;    // of x, rounded
};

}  // namespace h2o
