// CpuMatmul: products on the threads of a pool, by the kernels of the weights' types.
#pragma once

#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

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

  // As Backend::matmul_experts, where rows [offsets[e], offsets[e + 1]) are those of expert e.
  void experts(std::initializer_list<Product> products, const Tensor& x,
               std::span<const int32_t> offsets, bool add = false);

  // Between products, of as many bytes at least as a row of a reserved weight.
  std::byte* scratch() { return rounded_.data(); }

 private:
  // Rows [first, first + n) of x, which are multiplied with the same weights.
  struct Run {
    int64_t expert;
    int64_t first;
    int64_t n;
  };

  // A product of a run in tiles: panels of columns, and where these are few, of some of the rows.
  struct Part {
    Matmul m;
    const TypeKernels* type;
    bool interleaved;
    int64_t first;  // where its rows are among those that are rounded together
    int64_t n_out;
    int64_t width;   // of a panel
    int64_t n_rows;  // of a tile
    int64_t n_panels;
    int64_t per_panel;  // tiles

    int64_t n_tiles() const { return n_panels * per_panel; }
  };

  void find_runs(int64_t begin, int64_t end, std::span<const int32_t> offsets);
  void show(const Product& product, const Tensor& x, std::span<const int32_t> offsets);
  void multiply(std::span<const Product> products, std::span<const Run> runs, const Tensor& x,
                bool add);
  void round(const TypeKernels& type, std::span<const Run> runs, const Tensor& x);
  Part divide(const Product& product, const Tensor& x, int64_t first, bool add) const;
  void run_parts();
  void run(const Part& part, int thread, int64_t begin, int64_t end);

  Int8Rows int8_rows(int64_t first, int64_t n_rows, int64_t n_in, int64_t group) const;
  Bf16Rows bf16_rows(int64_t n_rows, int64_t n_in) const;

  const CpuKernels& kernels_;
  ThreadPool& pool_;
  Buffer panels_;   // of each thread
  Buffer rounded_;  // rows of x
  std::vector<Run> runs_;
  std::vector<Part> parts_;  // that are run together
  ProductObserver observer_;
};

}  // namespace h2o
