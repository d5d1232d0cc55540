// CpuMatmul: products on the threads of a pool, by the kernels of the weights' types.
#pragma once

#include <initializer_list>
#include <span>
#include <utility>

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

namespace h2o {

class CpuMatmul {
 public:
  CpuMatmul(const CpuKernels& kernels, ThreadPool& pool);

  // What a product with the weight needs, so that nothing is allocated later. Throws OutOfMemory.
  void reserve(const Tensor& weight);

  // As Backend::observe.
  void observe(ProductObserver observer) { observer_ = std::move(observer); }

  // As Backend::matmul; with `add` as matmul_add.
  void operator()(std::initializer_list<Product> products, const Tensor& x, bool add);

  // Between products, of as many bytes at least as a row of a reserved weight.
  std::byte* scratch() { return rounded_.data(); }

 private:
  struct Part;

  void multiply(std::span<const Product> products, const Tensor& x, int64_t first_row, bool add);
  void round(const TypeKernels& type, const Tensor& x);
  Part divide(const Product& product, const Tensor& x, int64_t first_row, bool add) const;
  void run(const Part& part, int thread, int64_t begin, int64_t end);

  Int8Rows int8_rows(int64_t n_rows, int64_t n_in, int64_t group) const;
  Bf16Rows bf16_rows(int64_t n_rows, int64_t n_in) const;

  const CpuKernels& kernels_;
  ThreadPool& pool_;
  Buffer panels_;   // of each thread
  Buffer rounded_;  // rows of x
  ProductObserver observer_;
};

}  // namespace h2o
