#include "cpu/matmul/cpu_matmul.h"

#include <algorithm>

#include "core/error.h"
#include "cpu/allocate.h"

namespace h2o {
namespace {

// Bytes per thread. Unused parts are never touched and take no memory.
constexpr int64_t kWorkspace =
    std::max({kInt8Workspace, kBf16Workspace, kMatmulWorkspace * int64_t{sizeof(float)}});

// Rows of a product are not divided below this: a thread reads a panel of weights for all of them.
constexpr int64_t kMinRows = 48;

// Tiles of a product per thread, for load balancing.
constexpr int64_t kTilesPerThread = 4;

// Products of the same x in a layer.
constexpr size_t kProductsTogether = 3;

// Size of the rounded rows of one call.
int64_t int8_bytes(int64_t n_in) {
  return kRoundedRows * (n_in + n_in / 32 * 4 + n_in / kInt8Group * 4);
}
int64_t bf16_bytes(int64_t n_in) {
  const int64_t n_blocks = (n_in + kBf16Block - 1) / kBf16Block;
  return kRoundedRows * n_blocks * kBf16Block * static_cast<int64_t>(sizeof(BF16));
}

int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Do both types read the same rounded rows?
bool share_rounding(const TypeKernels& a, const TypeKernels& b) {
  return (a.int8_matmul == nullptr) == (b.int8_matmul == nullptr) && a.int8_group == b.int8_group &&
         (a.bf16_matmul == nullptr) == (b.bf16_matmul == nullptr);
}

Tensor rows_of(const Tensor& t, int64_t begin, int64_t n) {
  return {t.row(begin), t.dtype, n, t.cols, t.interleaved};
}

// The weights of one expert of a product.
Affine expert(const Product& product, int64_t e) {
  const Affine& w = product.w;
  const int64_t row = product.row(e), n = product.y.cols;
  Tensor bias;
  if (w.bias) bias = {reinterpret_cast<std::byte*>(w.bias.floats() + row), DType::f32, 1, n};
  return {rows_of(w.weight, row, n), bias, {}};
}

float factor(const Product& product, int64_t e) {
  return product.w.factor ? product.w.factor.floats()[e] : 1.0f;
}

}  // namespace

CpuMatmul::CpuMatmul(const CpuKernels& kernels, ThreadPool& pool)
    : kernels_(kernels), pool_(pool), panels_(allocate_zeros(pool.size() * kWorkspace)) {
  // A run has at least one of the rows that are rounded together.
  runs_.reserve(kRoundedRows);
  parts_.reserve(kProductsTogether * kRoundedRows);
}

void CpuMatmul::reserve(const Tensor& weight) {
  const TypeKernels& type = kernels_.of(weight.dtype);
  int64_t bytes = 0;
  if (type.int8_matmul != nullptr) bytes = int8_bytes(weight.cols);
  if (type.bf16_matmul != nullptr) bytes = bf16_bytes(weight.cols);
  require(type.int8_matmul != nullptr || type.matmul != nullptr || weight.cols <= kMatmulWorkspace,
          "exact=True: rows of weights have ", weight.cols, " elements, expected at most ",
          kMatmulWorkspace);
  if (static_cast<size_t>(bytes) > rounded_.size()) rounded_ = allocate_zeros(bytes);
}

void CpuMatmul::operator()(std::initializer_list<Product> products, const Tensor& x, bool add) {
  experts(products, x, {}, add);
}

void CpuMatmul::experts(std::initializer_list<Product> products, const Tensor& x,
                        const ExpertRows& rows, bool add) {
  const auto type = [this](const Product& p) -> const TypeKernels& {
    return kernels_.of(p.w.weight.dtype);
  };
  for (const Product& product : products) {
    reserve(product.w.weight);
    if (observer_) show(product, x, rows);
  }
  for (int64_t row = 0; row < x.rows; row += kRoundedRows) {
    const int64_t end = std::min(x.rows, row + kRoundedRows);
    for (auto first = products.begin(); first != products.end();) {
      auto last = first + 1;
      while (last != products.end() && share_rounding(type(*first), type(*last)) &&
             !first->w.factor && !last->w.factor) {
        ++last;
      }
      find_runs(row, end, x.rows, rows);
      // Rows rounded to bf16 come in blocks, which several runs would not fill.
      const int64_t together = type(*first).bf16_matmul == nullptr ? std::ssize(runs_) : 1;
      for (int64_t i = 0; i < std::ssize(runs_); i += together) {
        multiply({first, last}, std::span(runs_).subspan(i, together), x, add);
      }
      first = last;
    }
  }
}

// Divides rows [begin, end), of n_rows in all, into runs by expert.
void CpuMatmul::find_runs(int64_t begin, int64_t end, int64_t n_rows, const ExpertRows& rows) {
  const auto first_of = [&](int64_t e) {
    return rows.offsets != nullptr ? rows.offsets[e] : n_rows / rows.n * e;
  };
  runs_.clear();
  for (int64_t e = 0; e < rows.n; ++e) {
    const int64_t first = std::max(first_of(e), begin);
    const int64_t n = std::min(first_of(e + 1), end) - first;
    if (n > 0) runs_.push_back({e, first, n});
  }
}

void CpuMatmul::show(const Product& product, const Tensor& x, const ExpertRows& rows) {
  find_runs(0, x.rows, x.rows, rows);
  for (const Run& run : runs_) {
    observer_(expert(product, run.expert).weight, rows_of(x, run.first, run.n));
  }
}

// Multiplies with types that use the same rounded rows.
void CpuMatmul::multiply(std::span<const Product> products, std::span<const Run> runs,
                         const Tensor& x, bool add) {
  round(products[0], runs, x);
  parts_.clear();
  for (const Product& product : products) {
    for (const Run& run : runs) {
      const Product part{rows_of(product.y, run.first, run.n), expert(product, run.expert)};
      parts_.push_back(divide(part, rows_of(x, run.first, run.n), run.first - runs[0].first, add));
      parts_.back().factor = factor(product, run.expert);
    }
  }
  run_parts();
}

// The weight's factor, if any, becomes a part of the scales of x.
void CpuMatmul::round(const Product& product, std::span<const Run> runs, const Tensor& x) {
  const TypeKernels& type = kernels_.of(product.w.weight.dtype);
  const int64_t before = runs.front().first;
  const int64_t n_rows = runs.back().first + runs.back().n - before;
  const int64_t work = n_rows * x.cols;
  if (type.int8_matmul != nullptr) {
    pool_.parallel_for(n_rows, work, [&](int, int64_t begin, int64_t end) {
      for (const Run& run : runs) {
        const int64_t first = run.first - before;
        const int64_t from = std::max<int64_t>(begin - first, 0);
        const int64_t to = std::min(end - first, run.n);
        if (from >= to) continue;
        const Int8Rows rows = int8_rows(first, run.n, x.cols, type.int8_group);
        kernels_.quantize_rows(rows, rows_of(x, run.first, run.n).floats(), from, to);
        if (!product.w.factor) continue;
        kernels_.scale(rows.scales + from * x.cols / 32, (to - from) * x.cols / 32,
                       factor(product, run.expert));
      }
    });
  } else if (type.bf16_matmul != nullptr) {
    const Bf16Rows to = bf16_rows(n_rows, x.cols);
    const int64_t n_blocks = (n_rows + kBf16Block - 1) / kBf16Block;
    pool_.parallel_for(n_blocks, work, [&](int, int64_t begin, int64_t end) {
      kernels_.round_rows(to, rows_of(x, before, n_rows).floats(), begin * kBf16Block,
                          std::min(end * kBf16Block, n_rows));
    });
  }
}

// `first`: index of x's rows among the rows rounded together.
CpuMatmul::Part CpuMatmul::divide(const Product& product, const Tensor& x, int64_t first,
                                  bool add) const {
  const Tensor& y = product.y;
  const Affine& w = product.w;
  const TypeKernels& type = kernels_.of(w.weight.dtype);
  Part part{.m = {.y = y.floats(),
                  .x = x.floats(),
                  .w = w.weight.data,
                  .bias = w.bias ? w.bias.floats() : nullptr,
                  .n_rows = x.rows,
                  .n_in = x.cols,
                  .w_row_bytes = w.weight.row_bytes(),
                  .y_stride = y.cols,
                  .add = add,
                  .prefetches = kernels_.prefetches},
            .type = &type,
            .interleaved = w.weight.interleaved,
            .first = first,
            .n_out = w.weight.rows,
            .width = x.rows == 1 && type.int8_matmul != nullptr ? kInterleaved : kInt8Columns,
            .n_rows = x.rows,
            .n_panels = 0,
            .per_panel = 1};
  part.n_panels = (part.n_out + part.width - 1) / part.width;
  if (type.int8_matmul != nullptr) {
    const int64_t wanted = (kTilesPerThread * pool_.size() + part.n_panels - 1) / part.n_panels;
    const int64_t n_parts = std::clamp<int64_t>(x.rows / kMinRows, 1, wanted);
    if (n_parts > 1) {
      part.n_rows = padded((x.rows + n_parts - 1) / n_parts, kernels_.row_multiple);
    }
    part.per_panel = (x.rows + part.n_rows - 1) / part.n_rows;
  }
  return part;
}

void CpuMatmul::run_parts() {
  int64_t n_tiles = 0;
  int64_t work = 0;
  for (const Part& part : parts_) {
    n_tiles += part.n_tiles();
    work += part.m.n_rows * part.m.n_in * part.n_out;
  }
  pool_.parallel_for(n_tiles, work, [&](int thread, int64_t begin, int64_t end) {
    for (const Part& part : parts_) {
      if (begin < std::min(end, part.n_tiles())) {
        run(part, thread, std::max<int64_t>(begin, 0), std::min(end, part.n_tiles()));
      }
      begin -= part.n_tiles();
      end -= part.n_tiles();
    }
  });
}

// Tiles [begin, end) of a product; tiles of a panel are consecutive.
void CpuMatmul::run(const Part& part, int thread, int64_t begin, int64_t end) {
  std::byte* const workspace = panels_.data() + thread * kWorkspace;
  const auto multiply = [&](int64_t first_row, int64_t n_rows, int64_t column, int64_t end_column) {
    if (part.type->int8_matmul != nullptr) {
      const auto kernel = part.interleaved ? part.type->interleaved_matmul : part.type->int8_matmul;
      const Int8Rows all = int8_rows(part.first, part.m.n_rows, part.m.n_in, part.type->int8_group);
      const int64_t at = first_row * part.m.n_in;
      Matmul some = part.m;
      some.y += first_row * some.y_stride;
      some.n_rows = n_rows;
      kernel(some,
             {all.q + at, all.scales + at / 32, all.sums + at / all.group, all.n_rows, all.n_in,
              all.group},
             column, end_column, workspace);
    } else if (part.type->bf16_matmul != nullptr) {
      part.type->bf16_matmul(part.m, bf16_rows(part.m.n_rows, part.m.n_in), column, end_column,
                             workspace);
    } else if (part.type->matmul != nullptr && part.factor == 1) {
      Matmul all = part.m;
      all.workspace = reinterpret_cast<float*>(workspace);
      part.type->matmul(all, column, end_column);
    } else {
      multiply_decoded(part, reinterpret_cast<float*>(workspace), column, end_column);
    }
  };
  if (part.per_panel == 1) {
    multiply(0, part.m.n_rows, begin * part.width, std::min(end * part.width, part.n_out));
    return;
  }
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = i % part.per_panel * part.n_rows;
    const int64_t column = i / part.per_panel * part.width;
    multiply(row, std::min(part.n_rows, part.m.n_rows - row), column,
             std::min(column + part.width, part.n_out));
  }
}

// Columns [begin, end) of a product, with as many of them decoded at a time as fit.
void CpuMatmul::multiply_decoded(const Part& part, float* decoded, int64_t begin,
                                 int64_t end) const {
  const int64_t n_in = part.m.n_in;
  const int64_t most = kMatmulWorkspace / n_in;
  for (int64_t o = begin; o < end; o += most) {
    const int64_t n = std::min(most, end - o);
    for (int64_t j = 0; j < n; ++j) {
      part.type->decode(decoded + j * n_in, part.m.w + (o + j) * part.m.w_row_bytes, n_in);
    }
    if (part.factor != 1) kernels_.scale(decoded, n * n_in, part.factor);
    Matmul some = part.m;
    some.w = reinterpret_cast<const std::byte*>(decoded);
    some.w_row_bytes = n_in * static_cast<int64_t>(sizeof(float));
    some.y += o;
    if (some.bias != nullptr) some.bias += o;
    kernels_.f32.matmul(some, 0, n);
  }
}

// The rows of a run that starts at rounded row `first`.
Int8Rows CpuMatmul::int8_rows(int64_t first, int64_t n_rows, int64_t n_in, int64_t group) const {
  const int64_t row_bytes = n_in + n_in / 32 * 4 + n_in / group * 4;
  auto* q = rounded_.as<int8_t>() + first * row_bytes;
  auto* scales = reinterpret_cast<float*>(q + n_rows * n_in);
  auto* sums = reinterpret_cast<int32_t*>(scales + n_rows * n_in / 32);
  return {q, scales, sums, n_rows, n_in, group};
}

Bf16Rows CpuMatmul::bf16_rows(int64_t n_rows, int64_t n_in) const {
  return {rounded_.as<BF16>(), n_rows, n_in};
}

}  // namespace h2o
