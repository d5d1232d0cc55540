// Matmul kernels on rows rounded to bf16, on the instruction sets that have them: sums of rounded
// products, bit-identical for every batch.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include "bounds.h"
#include "cpu/cpu_backend.h"
#include "cpu/isa/detect.h"

namespace h2o {
namespace {

std::vector<const CpuKernels*> tables() {
  std::vector<const CpuKernels*> found;
  for (const CpuKernels* table : supported_kernels()) {
    const bool has = table->f16.bf16_matmul != nullptr;
    CHECK(has == multiplies_in_bf16(table->isa));
    CHECK((table->bf16.bf16_matmul != nullptr) == has);
    CHECK((table->f32.bf16_matmul != nullptr) == false);
    if (has) found.push_back(table);
  }
  return found;
}

// Rows of 16-bit floats, allocated so that AddressSanitizer detects reads past the last row. Gaps
// of NaN separate them.
struct Weights {
  std::vector<uint16_t> bits;
  int64_t stride;
  std::vector<double> values;  // [n, n_in]

  Weights(Random& random, DType dtype, int64_t n, int64_t n_in)
      : stride(n_in + random.integer(0, 3)) {
    bits.assign((n - 1) * stride + n_in, 0xffff);
    std::vector<float> row;
    for (int64_t o = 0; o < n; ++o) {
      row = random.reals(n_in);
      auto* to = reinterpret_cast<std::byte*>(bits.data() + o * stride);
      choose_kernels("scalar").of(dtype).encode(to, row.data(), n_in);
      for (int64_t i = 0; i < n_in; ++i) {
        const uint16_t value = bits[o * stride + i];
        values.push_back(dtype == DType::f16 ? f16_value(value) : bf16_value(value));
      }
    }
  }
};

int64_t padded(int64_t n) { return (n + kBf16Block - 1) / kBf16Block * kBf16Block; }

// y[n_rows, y_stride], of which columns [begin, end) are written.
void multiply(const CpuKernels& table, DType dtype, const Matmul& m, int64_t begin, int64_t end) {
  std::vector<BF16> rounded(padded(m.n_rows) * padded(m.n_in), BF16{0xffff});
  const Bf16Rows x{rounded.data(), m.n_rows, m.n_in};
  for (int64_t r = 0; r < m.n_rows; r += kBf16Block) {
    table.round_rows(x, m.x, r, std::min(m.n_rows, r + kBf16Block));
  }
  static const Buffer workspace = make_cpu_backend(1, "scalar")->allocate(kBf16Workspace);
  table.of(dtype).bf16_matmul(m, x, begin, end, workspace.data());
}

// Ties to even; denormals are flushed to zero.
double nearest_bf16(double x) {
  int exponent;
  const double whole = std::nearbyint(std::ldexp(std::frexp(x, &exponent), 8));
  return std::abs(x) < 0x1p-126 ? 0 : std::ldexp(whole, exponent - 8);
}

// For n products, each rounded when added, as are the sums of the lanes and those with the bias and
// with y; denormal sums are flushed to zero.
double bound_of(int64_t n, double magnitude) {
  return gamma(n + 6) * magnitude + static_cast<double>(n + 6) * 0x1p-126;
}

TEST_CASE("bf16_matmul is the sum of rounded products, and writes its columns only") {
  for (const CpuKernels* table : tables()) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      CAPTURE(std::string_view(table->isa));
      CAPTURE(info(dtype).name);
      Random random(1);
      for (int trial = 0; trial < 150; ++trial) {
        const int64_t n_in = random.integer(1, trial % 4 == 0 ? 700 : 100);
        const int64_t n_out = random.integer(1, 70);
        const int64_t n_rows = random.integer(1, trial % 2 == 0 ? 17 : 70);
        const int64_t begin = random.integer(0, static_cast<int32_t>(n_out));
        const int64_t end =
            random.integer(static_cast<int32_t>(begin), static_cast<int32_t>(n_out));
        const int64_t stride = n_out + random.integer(0, 3);
        const bool add = random.flip();
        CAPTURE(n_in);
        CAPTURE(n_rows);
        CAPTURE(begin);
        CAPTURE(end);
        const Weights w(random, dtype, n_out, n_in);
        const std::vector<float> x = random.reals(n_rows * n_in);
        const std::vector<float> bias = random.flip() ? random.reals(n_out) : std::vector<float>();
        // One more row on either side that must not change.
        const std::vector<float> before = random.reals((n_rows + 2) * stride);
        std::vector<float> y = before;
        multiply(*table, dtype,
                 {.y = y.data() + stride,
                  .x = x.data(),
                  .w = reinterpret_cast<const std::byte*>(w.bits.data()),
                  .bias = bias.empty() ? nullptr : bias.data(),
                  .n_rows = n_rows,
                  .n_in = n_in,
                  .w_row_bytes = w.stride * 2,
                  .y_stride = stride,
                  .add = add},
                 begin, end);

        int n_wrong = 0;
        int n_touched = 0;
        for (int64_t r = -1; r <= n_rows; ++r) {
          for (int64_t o = 0; o < stride; ++o) {
            const int64_t at = (r + 1) * stride + o;
            if (r < 0 || r == n_rows || o < begin || o >= end) {
              n_touched += !same_bits(y[at], before[at]);
              continue;
            }
            double sum = 0;
            double magnitude = 0;
            for (int64_t i = 0; i < n_in; ++i) {
              const double product =
                  nearest_bf16(x[r * n_in + i]) * nearest_bf16(w.values[o * n_in + i]);
              sum += product;
              magnitude += std::abs(product);
            }
            for (const double term : {bias.empty() ? 0.0 : bias[o], add ? before[at] : 0.0}) {
              sum += term;
              magnitude += std::abs(term);
            }
            n_wrong += !(std::abs(y[at] - sum) <= bound_of(n_in, magnitude));
          }
        }
        CHECK(n_wrong == 0);
        CHECK(n_touched == 0);
      }
    }
  }
}

TEST_CASE("an output of bf16_matmul has the same bits in every batch and range of columns") {
  struct Shape {
    int64_t n_rows, n_in, n_out;
  };
  // With one step and with tails, with several panels or parts in depth, and with more columns than
  // are kept at a time.
  for (const Shape& shape : {Shape{20, 96, 40},
                             {70, 50, 21},
                             {9, 64, 16},
                             {33, 600, 70},
                             {34, 300, 300},
                             {70, 2090, 21}}) {
    const int64_t n_rows = shape.n_rows, n_in = shape.n_in, n_out = shape.n_out;
    for (const CpuKernels* table : tables()) {
      for (const DType dtype : {DType::f16, DType::bf16}) {
        CAPTURE(std::string_view(table->isa));
        CAPTURE(info(dtype).name);
        CAPTURE(n_in);
        Random random(2);
        const Weights w(random, dtype, n_out, n_in);
        const std::vector<float> x = random.reals(n_rows * n_in);
        const std::vector<float> bias = random.reals(n_out);
        Matmul m{.y = nullptr,
                 .x = x.data(),
                 .w = reinterpret_cast<const std::byte*>(w.bits.data()),
                 .bias = bias.data(),
                 .n_rows = n_rows,
                 .n_in = n_in,
                 .w_row_bytes = w.stride * 2,
                 .y_stride = n_out,
                 .add = true};
        const std::vector<float> before = random.reals(n_rows * n_out);
        std::vector<float> whole = before;
        m.y = whole.data();
        multiply(*table, dtype, m, 0, n_out);

        int n_different = 0;
        const auto check = [&](int64_t row, int64_t rows, int64_t begin, int64_t end) {
          std::vector<float> part = before;
          m.x = x.data() + row * n_in;
          m.y = part.data() + row * n_out;
          m.n_rows = rows;
          multiply(*table, dtype, m, begin, end);
          for (int64_t r = row; r < row + rows; ++r) {
            for (int64_t o = begin; o < end; ++o) {
              n_different += !same_bits(part[r * n_out + o], whole[r * n_out + o]);
            }
          }
        };
        for (int64_t row = 0; row < n_rows; ++row) {
          check(row, 1, 0, n_out);
          check(row, std::min<int64_t>(n_rows - row, 1 + row % 18), row % n_out, n_out);
        }
        for (int64_t o = 0; o < n_out; ++o) check(o % n_rows, 1, o, o + 1);
        for (int64_t o = 0; o < n_out; o += 13) check(0, n_rows, o, std::min(n_out, o + 37));
        CHECK(n_different == 0);
      }
    }
  }
}

TEST_CASE("bf16_matmul flushes denormals to zero and propagates infinity and NaN") {
  for (const CpuKernels* table : tables()) {
    CAPTURE(std::string_view(table->isa));
    constexpr int64_t kIn = 40, kRows = 20;
    std::vector<uint16_t> w(2 * kIn, 0x3f80);  // 1
    w[kIn + 3] = 0x0001;                       // denormal in bf16
    w[kIn + 39] = 0x7f80;                      // infinity
    std::vector<float> x(kRows * kIn, 1);
    x[0] = NAN;
    x[kIn + 38] = INFINITY;
    x[2 * kIn + 5] = 1e-40f;
    x[3 * kIn + 6] = 0x1.fep127f;  // the largest bf16
    x[4 * kIn + 7] = 0x1.01p0f;    // a tie: to even
    x[5 * kIn + 7] = 0x1.03p0f;    // and up
    x[6 * kIn + 39] = 0;           // times infinity
    std::vector<float> y(kRows * 2);
    multiply(*table, DType::bf16,
             {.y = y.data(),
              .x = x.data(),
              .w = reinterpret_cast<const std::byte*>(w.data()),
              .bias = nullptr,
              .n_rows = kRows,
              .n_in = kIn,
              .w_row_bytes = kIn * 2,
              .y_stride = 2,
              .add = false},
             0, 2);
    CHECK(std::isnan(y[0]));
    CHECK(y[2] == INFINITY);
    CHECK(y[4] == kIn - 1);
    CHECK(y[6] == 0x1.fep127f);
    CHECK(y[8] == kIn);
    CHECK(y[10] == kIn + 0x1p-6f);
    CHECK(y[12] == kIn - 1);
    CHECK(std::isnan(y[13]));
    for (int64_t r = 7; r < kRows; ++r) {
      CHECK(y[r * 2] == kIn);
      CHECK(y[r * 2 + 1] == INFINITY);
    }
  }
}

// Also where products are in float. More rows than are rounded at a time, and several threads.
TEST_CASE("the back end multiplies any number of rows with weights of 16 bits") {
  Random random(4);
  const int64_t n_in = 70, n_out = 90, n_rows = 2 * kRoundedRows + 21;
  for (const CpuKernels* table : supported_kernels()) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      CAPTURE(std::string_view(table->isa));
      std::vector<float> values(n_out * n_in), x(n_rows * n_in), y(n_rows * n_out);
      for (float& value : values) value = static_cast<float>(random.integer(-255, 255));
      for (float& value : x) value = static_cast<float>(random.integer(-255, 255));
      std::vector<std::byte> w(byte_size(dtype, n_out * n_in));
      table->of(dtype).encode(w.data(), values.data(), n_out * n_in);
      const auto tensor = [](std::vector<float>& data, int64_t rows, int64_t cols) {
        return Tensor{reinterpret_cast<std::byte*>(data.data()), DType::f32, rows, cols};
      };
      make_cpu_backend(3, table->isa)
          ->matmul(tensor(y, n_rows, n_out), tensor(x, n_rows, n_in),
                   {{w.data(), dtype, n_out, n_in}, {}});
      int n_wrong = 0;
      for (int64_t r = 0; r < n_rows; ++r) {
        for (int64_t o = 0; o < n_out; ++o) {
          double expected = 0;  // of integers below 2^24: no sum is rounded
          for (int64_t i = 0; i < n_in; ++i) {
            expected += double{x[r * n_in + i]} * values[o * n_in + i];
          }
          n_wrong += y[r * n_out + o] != expected;
        }
      }
      CHECK(n_wrong == 0);
    }
  }
}

}  // namespace
}  // namespace h2o
