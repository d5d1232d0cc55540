#include "cpu/matmul/cpu_matmul.h"

#include <algorithm>

#include "cpu/allocate.h"

namespace h2o {
namespace {

// Of a thread. What it does not use is never touched, and takes no memory.
constexpr int64_t kWorkspace = std::max(kInt8Workspace, kBf16Workspace);

// Rows of a product that are not divided: a thread reads a panel of weights for them.
constexpr int64_t kLeastRows = 48;

// As many tiles of a product for each thread even out what they take.
constexpr int64_t kPartsPerThread = 4;

// What the rounded rows of one call take.
int64_t int8_bytes(int64_t n_in) {
  return kInt8Rows * (n_in + n_in / 32 * 4 + n_in / kInt8Group * 4);
}
int64_t bf16_bytes(int64_t n_in) {
  const int64_t n_blocks = (n_in + kBf16Block - 1) / kBf16Block;
  return kBf16Rows * n_blocks * kBf16Block * static_cast<int64_t>(sizeof(BF16));
}

// Whole tiles of rows, of every instruction set.
int64_t padded(int64_t n_rows) { return (n_rows + 11) / 12 * 12; }

}  // namespace

CpuMatmul::CpuMatmul(const CpuKernels& kernels, ThreadPool& pool)
    : kernels_(kernels), pool_(pool), panels_(allocate_zeros(pool.size() * kWorkspace)) {}

void CpuMatmul::reserve(const Tensor& weight) {
  const TypeKernels& type = kernels_.of(weight.dtype);
  int64_t bytes = 0;
  if (type.int8_matmul != nullptr) bytes = int8_bytes(weight.cols);
  if (type.bf16_matmul != nullptr) bytes = bf16_bytes(weight.cols);
  if (static_cast<size_t>(bytes) > rows_.size()) rows_ = allocate_zeros(bytes);
}

void CpuMatmul::operator()(const Tensor& y, const Tensor& x, const Affine& w, bool add) {
  const TypeKernels& type = kernels_.of(w.weight.dtype);
  const Matmul m{.y = y.floats(),
                 .x = x.floats(),
                 .w = w.weight.data,
                 .bias = w.bias ? w.bias.floats() : nullptr,
                 .n_rows = x.rows,
                 .n_in = x.cols,
                 .w_row_bytes = w.weight.row_bytes(),
                 .y_stride = y.cols,
                 .add = add};
  if (type.int8_matmul != nullptr) {
    multiply_int8(type, w.weight.interleaved ? type.interleaved_matmul : type.int8_matmul, m,
                  w.weight.rows);
  } else if (type.bf16_matmul != nullptr) {
    multiply_bf16(type, m, w.weight.rows);
  } else {
    for_columns(m, w.weight.rows,
                [&](int, int64_t begin, int64_t end) { type.matmul(m, begin, end); });
  }
}

// Rounds kInt8Rows rows of x at a time, then multiplies.
void CpuMatmul::multiply_int8(const TypeKernels& type, decltype(type.int8_matmul) kernel, Matmul m,
                              int64_t n_out) {
  const int64_t n_rows = m.n_rows;
  for (int64_t row = 0; row < n_rows; row += kInt8Rows) {
    m.n_rows = std::min(n_rows - row, kInt8Rows);
    const Int8Rows x = int8_rows(m.n_rows, m.n_in, type.int8_group);
    pool_.parallel_for(m.n_rows, m.n_rows * m.n_in, [&](int, int64_t begin, int64_t end) {
      kernels_.quantize_rows(x, m.x, begin, end);
    });
    const auto rows = [&](int64_t first, int64_t n) {
      const int64_t at = first * m.n_in;
      return Int8Rows{x.q + at, x.scales + at / 32, x.sums + at / x.group, n, x.n_in, x.group};
    };
    for_tiles(m, n_out, [&](int thread, int64_t first, int64_t n, int64_t begin, int64_t end) {
      Matmul some = m;
      some.y += first * m.y_stride;
      some.n_rows = n;
      kernel(some, rows(first, n), begin, end, panel(thread));
    });
    m.x += m.n_rows * m.n_in;
    m.y += m.n_rows * m.y_stride;
  }
}

// The same with kBf16Rows rows.
void CpuMatmul::multiply_bf16(const TypeKernels& type, Matmul m, int64_t n_out) {
  const int64_t n_rows = m.n_rows;
  for (int64_t row = 0; row < n_rows; row += kBf16Rows) {
    m.n_rows = std::min(n_rows - row, kBf16Rows);
    const Bf16Rows x{rows_.as<BF16>(), m.n_rows, m.n_in};
    const int64_t n_blocks = (m.n_rows + kBf16Block - 1) / kBf16Block;
    pool_.parallel_for(n_blocks, m.n_rows * m.n_in, [&](int, int64_t begin, int64_t end) {
      kernels_.round_rows(x, m.x, begin * kBf16Block, std::min(end * kBf16Block, m.n_rows));
    });
    for_columns(m, n_out, [&](int thread, int64_t begin, int64_t end) {
      type.bf16_matmul(m, x, begin, end, panel(thread));
    });
    m.x += m.n_rows * m.n_in;
    m.y += m.n_rows * m.y_stride;
  }
}

// Hands out panels of columns; and where these are few, of some of the rows.
template <class Body>
void CpuMatmul::for_tiles(const Matmul& m, int64_t n_out, const Body& body) {
  const int64_t width = m.n_rows == 1 ? kInterleaved : kInt8Columns;
  const int64_t n_panels = (n_out + width - 1) / width;
  const int64_t wanted = (kPartsPerThread * pool_.size() + n_panels - 1) / n_panels;
  const int64_t n_parts = std::clamp<int64_t>(m.n_rows / kLeastRows, 1, wanted);
  const int64_t n_rows = n_parts == 1 ? m.n_rows : padded((m.n_rows + n_parts - 1) / n_parts);
  const int64_t n_tiles = n_panels * ((m.n_rows + n_rows - 1) / n_rows);
  const int64_t per_panel = n_tiles / n_panels;
  pool_.parallel_for(n_tiles, m.n_rows * m.n_in * n_out,
                     [&](int thread, int64_t begin, int64_t end) {
                       if (per_panel == 1) {
                         body(thread, 0, m.n_rows, begin * width, std::min(end * width, n_out));
                         return;
                       }
                       for (int64_t i = begin; i < end; ++i) {
                         const int64_t first = i % per_panel * n_rows;
                         const int64_t column = i / per_panel * width;
                         body(thread, first, std::min(n_rows, m.n_rows - first), column,
                              std::min(column + width, n_out));
                       }
                     });
}

// Hands out whole panels of columns.
template <class Body>
void CpuMatmul::for_columns(const Matmul& m, int64_t n_out, const Body& body) {
  const int64_t n_panels = (n_out + kInt8Columns - 1) / kInt8Columns;
  pool_.parallel_for(n_panels, m.n_rows * m.n_in * n_out,
                     [&](int thread, int64_t begin, int64_t end) {
                       body(thread, begin * kInt8Columns, std::min(end * kInt8Columns, n_out));
                     });
}

Int8Rows CpuMatmul::int8_rows(int64_t n_rows, int64_t n_in, int64_t group) const {
  auto* q = rows_.as<int8_t>();
  auto* scales = reinterpret_cast<float*>(q + n_rows * n_in);
  auto* sums = reinterpret_cast<int32_t*>(scales + n_rows * n_in / 32);
  return {q, scales, sums, n_rows, n_in, group};
}

std::byte* CpuMatmul::panel(int thread) { return panels_.data() + thread * kWorkspace; }

}  // namespace h2o
