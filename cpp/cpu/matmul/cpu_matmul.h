// CpuMatmul: matrix products on a thread pool, with the kernels of the weights' types.
#pragma once

#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

namespace h2o {

// The rows of each of n experts: see Routes::offsets.
struct ExpertRows {
  int64_t n = 1;
  const int32_t* offsets = nullptr;
};

class CpuMatmul {
 public:
  CpuMatmul(const CpuKernels& kernels, ThreadPool& pool);

  // Allocates everything that a product with `weight` needs. Throws OutOfMemory.
  void reserve(const Tensor& weight);

  // See Backend::observe.
  void observe(ProductObserver observer) { observer_ = std::move(observer); }

  // See Backend::matmul; with `add`, Backend::matmul_add.
  void operator()(std::initializer_list<Product> products, const Tensor& x, bool add);

  // See Backend::matmul_experts.
  void experts(std::initializer_list<Product> products, const Tensor& x, const ExpertRows& rows,
               bool add = false);

  // Usable between products; at least the size of a row of any reserved weight.
  std::byte* scratch() { return rounded_.data(); }

 private:
  // Rows [first, first + n) of x, which are multiplied with the same weights.
  struct Run {
    int64_t expert;
    int64_t first;
    int64_t n;
  };

  // A product of a run in tiles: panels of columns and, if there are few, parts of the rows.
  struct Part {
    Matmul m;
    const TypeKernels* type;
    bool interleaved;
    int64_t first;  // index of its rows among those rounded together
    int64_t n_out;
    int64_t width;   // of a panel
    int64_t n_rows;  // of a tile
    int64_t n_panels;
    int64_t per_panel;  // number of tiles
    float factor = 1;   // of the weights, unless rounded rows have it

    int64_t n_tiles() const { return n_panels * per_panel; }
  };

  void find_runs(int64_t begin, int64_t end, int64_t n_rows, const ExpertRows& rows);
  void show(const Product& product, const Tensor& x, const ExpertRows& rows);
  void multiply(std::span<const Product> products, std::span<const Run> runs, const Tensor& x,
                bool add);
  void round(const Product& product, std::span<const Run> runs, const Tensor& x);
  Part divide(const Product& product, const Tensor& x, int64_t first, bool add) const;
  void run_parts();
  void run(const Part& part, int thread, int64_t begin, int64_t end);
  void multiply_decoded(const Part& part, float* decoded, int64_t begin, int64_t end) const;

  Int8Rows int8_rows(int64_t first, int64_t n_rows, int64_t n_in, int64_t group) const;
  Bf16Rows bf16_rows(int64_t n_rows, int64_t n_in) const;

  const CpuKernels& kernels_;
  ThreadPool& pool_;
  Buffer panels_;   // per thread
  Buffer rounded_;  // rows of x
  std::vector<Run> runs_;
  std::vector<Part> parts_;  // run together
  ProductObserver observer_;
};

}  // namespace h2o
