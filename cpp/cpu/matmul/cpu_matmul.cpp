#include "cpu/matmul/cpu_matmul.h"

#include <algorithm>
#include <array>

#include "cpu/allocate.h"

namespace h2o {
namespace {

// Of a thread. What it does not use is never touched, and takes no memory.
constexpr int64_t kWorkspace = std::max(kInt8Workspace, kBf16Workspace);

// Rows of a product that are not divided: a thread reads a panel of weights for them.
constexpr int64_t kLeastRows = 48;

// As many tiles of a product for each thread even out what they take.
constexpr int64_t kTilesPerThread = 4;

// At most so many products share the rounding of x.
constexpr size_t kTogether = 4;

// What the rounded rows of one call take.
int64_t int8_bytes(int64_t n_in) {
  return kRoundedRows * (n_in + n_in / 32 * 4 + n_in / kInt8Group * 4);
}
int64_t bf16_bytes(int64_t n_in) {
  const int64_t n_blocks = (n_in + kBf16Block - 1) / kBf16Block;
  return kRoundedRows * n_blocks * kBf16Block * static_cast<int64_t>(sizeof(BF16));
}

// Whole tiles of rows, of every instruction set.
int64_t padded(int64_t n_rows) { return (n_rows + 11) / 12 * 12; }

// Do both types read the same rounded rows?
bool share_rounding(const TypeKernels& a, const TypeKernels& b) {
  return (a.int8_matmul == nullptr) == (b.int8_matmul == nullptr) && a.int8_group == b.int8_group &&
         (a.bf16_matmul == nullptr) == (b.bf16_matmul == nullptr);
}

}  // namespace

// A product of some rows in tiles: panels of columns, and where these are few, of some of the rows.
struct CpuMatmul::Part {
  Matmul m;
  const TypeKernels* type;
  bool interleaved;
  int64_t n_out;
  int64_t width;   // of a panel
  int64_t n_rows;  // of a tile
  int64_t n_panels;
  int64_t per_panel;  // tiles

  int64_t n_tiles() const { return n_panels * per_panel; }
};

CpuMatmul::CpuMatmul(const CpuKernels& kernels, ThreadPool& pool)
    : kernels_(kernels), pool_(pool), panels_(allocate_zeros(pool.size() * kWorkspace)) {}

void CpuMatmul::reserve(const Tensor& weight) {
  const TypeKernels& type = kernels_.of(weight.dtype);
  int64_t bytes = 0;
  if (type.int8_matmul != nullptr) bytes = int8_bytes(weight.cols);
  if (type.bf16_matmul != nullptr) bytes = bf16_bytes(weight.cols);
  if (static_cast<size_t>(bytes) > rounded_.size()) rounded_ = allocate_zeros(bytes);
}

void CpuMatmul::operator()(std::initializer_list<Product> products, const Tensor& x, bool add) {
  const auto type = [this](const Product& p) -> const TypeKernels& {
    return kernels_.of(p.w.weight.dtype);
  };
  for (const Product& product : products) {
    reserve(product.w.weight);
    if (observer_) observer_(product.w.weight, x);
  }
  for (int64_t row = 0; row < x.rows; row += kRoundedRows) {
    const Tensor some{x.row(row), x.dtype, std::min(x.rows - row, kRoundedRows), x.cols};
    for (auto first = products.begin(); first != products.end();) {
      auto last = first + 1;
      while (last != products.end() && last - first < static_cast<int64_t>(kTogether) &&
             share_rounding(type(*first), type(*last))) {
        ++last;
      }
      round(type(*first), some);
      multiply({first, last}, some, row, add);
      first = last;
    }
  }
}

void CpuMatmul::round(const TypeKernels& type, const Tensor& x) {
  const float* const from = x.floats();
  const int64_t work = x.rows * x.cols;
  if (type.int8_matmul != nullptr) {
    const Int8Rows to = int8_rows(x.rows, x.cols, type.int8_group);
    pool_.parallel_for(x.rows, work, [&](int, int64_t begin, int64_t end) {
      kernels_.quantize_rows(to, from, begin, end);
    });
  } else if (type.bf16_matmul != nullptr) {
    const Bf16Rows to = bf16_rows(x.rows, x.cols);
    const int64_t n_blocks = (x.rows + kBf16Block - 1) / kBf16Block;
    pool_.parallel_for(n_blocks, work, [&](int, int64_t begin, int64_t end) {
      kernels_.round_rows(to, from, begin * kBf16Block, std::min(end * kBf16Block, x.rows));
    });
  }
}

// Of x, whose rounded rows are there.
void CpuMatmul::multiply(std::span<const Product> products, const Tensor& x, int64_t first_row,
                         bool add) {
  std::array<Part, kTogether> parts;
  int64_t n_tiles = 0;
  int64_t work = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    parts[i] = divide(products[i], x, first_row, add);
    n_tiles += parts[i].n_tiles();
    work += x.rows * x.cols * parts[i].n_out;
  }
  pool_.parallel_for(n_tiles, work, [&](int thread, int64_t begin, int64_t end) {
    for (const Part& part : std::span(parts).first(products.size())) {
      if (begin < std::min(end, part.n_tiles())) {
        run(part, thread, std::max<int64_t>(begin, 0), std::min(end, part.n_tiles()));
      }
      begin -= part.n_tiles();
      end -= part.n_tiles();
    }
  });
}

CpuMatmul::Part CpuMatmul::divide(const Product& product, const Tensor& x, int64_t first_row,
                                  bool add) const {
  const auto& [y, w] = product;
  const TypeKernels& type = kernels_.of(w.weight.dtype);
  Part part{.m = {.y = y.floats() + first_row * y.cols,
                  .x = x.floats(),
                  .w = w.weight.data,
                  .bias = w.bias ? w.bias.floats() : nullptr,
                  .n_rows = x.rows,
                  .n_in = x.cols,
                  .w_row_bytes = w.weight.row_bytes(),
                  .y_stride = y.cols,
                  .add = add},
            .type = &type,
            .interleaved = w.weight.interleaved,
            .n_out = w.weight.rows,
            .width = x.rows == 1 && type.int8_matmul != nullptr ? kInterleaved : kInt8Columns,
            .n_rows = x.rows,
            .n_panels = 0,
            .per_panel = 1};
  part.n_panels = (part.n_out + part.width - 1) / part.width;
  if (type.int8_matmul != nullptr) {
    const int64_t wanted = (kTilesPerThread * pool_.size() + part.n_panels - 1) / part.n_panels;
    const int64_t n_parts = std::clamp<int64_t>(x.rows / kLeastRows, 1, wanted);
    if (n_parts > 1) part.n_rows = padded((x.rows + n_parts - 1) / n_parts);
    part.per_panel = (x.rows + part.n_rows - 1) / part.n_rows;
  }
  return part;
}

// Tiles [begin, end) of a product, those of a panel one after the other.
void CpuMatmul::run(const Part& part, int thread, int64_t begin, int64_t end) {
  std::byte* const workspace = panels_.data() + thread * kWorkspace;
  const auto multiply = [&](int64_t first_row, int64_t n_rows, int64_t column, int64_t end_column) {
    if (part.type->int8_matmul != nullptr) {
      const auto kernel = part.interleaved ? part.type->interleaved_matmul : part.type->int8_matmul;
      const Int8Rows all = int8_rows(part.m.n_rows, part.m.n_in, part.type->int8_group);
      const int64_t at = first_row * part.m.n_in;
      Matmul some = part.m;
      some.y += first_row * some.y_stride;
      some.n_rows = n_rows;
      kernel(some,
             {all.q + at, all.scales + at / 32, all.sums + at / all.group, n_rows, all.n_in,
              all.group},
             column, end_column, workspace);
    } else if (part.type->bf16_matmul != nullptr) {
      part.type->bf16_matmul(part.m, bf16_rows(part.m.n_rows, part.m.n_in), column, end_column,
                             workspace);
    } else {
      part.type->matmul(part.m, column, end_column);
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

Int8Rows CpuMatmul::int8_rows(int64_t n_rows, int64_t n_in, int64_t group) const {
  auto* q = rounded_.as<int8_t>();
  auto* scales = reinterpret_cast<float*>(q + n_rows * n_in);
  auto* sums = reinterpret_cast<int32_t*>(scales + n_rows * n_in / 32);
  return {q, scales, sums, n_rows, n_in, group};
}

Bf16Rows CpuMatmul::bf16_rows(int64_t n_rows, int64_t n_in) const {
  return {rounded_.as<BF16>(), n_rows, n_in};
}

}  // namespace h2o
