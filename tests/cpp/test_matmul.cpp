// Matmul kernels of every instruction set, compared with sums in double: matmul and add_rows.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include "cpu/cpu_backend.h"
#include "cpu/isa/detect.h"
#include "testing.h"

namespace h2o {
namespace {

// Rows of one element type, allocated so that AddressSanitizer detects reads past the last row. The
// rows start `offset` bytes in, and gaps of 0xff bytes (NaN for floats) separate them.
struct Rows {
  std::vector<std::byte> bytes;
  int64_t offset;
  int64_t row_bytes;
  std::vector<double> values;  // [n, n_in]

  const std::byte* data() const { return bytes.data() + offset; }
};

// A number of either sign in [2^-6, 2), sometimes zero. Sums of products of these neither overflow
// nor underflow, as the bounds below assume.
template <class T>
T random_bits(Random& random, int exponent_bits, int fraction_bits) {
  if (random.integer(0, 9) == 0) return 0;
  const uint32_t bias = (1u << (exponent_bits - 1)) - 1;
  const uint32_t exponent = bias - static_cast<uint32_t>(random.integer(0, 6));
  const uint32_t fraction = random.bits() & ((1u << fraction_bits) - 1);
  const uint32_t sign = random.bits() & 1;
  return static_cast<T>(((sign << exponent_bits | exponent) << fraction_bits) | fraction);
}

Rows random_rows(Random& random, DType dtype, int64_t n, int64_t n_in) {
  const int64_t element = dtype == DType::f32 ? 4 : 2;  // alignment of rows
  Rows rows;
  rows.offset = element * random.integer(0, 5);
  const int64_t row = byte_size(dtype, n_in);
  rows.row_bytes = row + element * random.integer(0, 3);
  rows.bytes.assign(rows.offset + (n - 1) * rows.row_bytes + row, std::byte{0xff});
  for (int64_t r = 0; r < n; ++r) {
    std::byte* to = rows.bytes.data() + rows.offset + r * rows.row_bytes;
    const auto put = [&](auto bits) {
      std::memcpy(to, &bits, sizeof(bits));
      to += sizeof(bits);
    };
    double scale = 0;
    for (int64_t i = 0; i < n_in; ++i) {
      if (dtype == DType::f32) {
        const auto bits = random_bits<uint32_t>(random, 8, 23);
        rows.values.push_back(std::bit_cast<float>(bits));
        put(bits);
      } else if (dtype == DType::f16) {
        const auto bits = random_bits<uint16_t>(random, 5, 10);
        rows.values.push_back(f16_value(bits));
        put(bits);
      } else if (dtype == DType::bf16) {
        const auto bits = random_bits<uint16_t>(random, 8, 7);
        rows.values.push_back(bf16_value(bits));
        put(bits);
      } else {
        if (i % 32 == 0) {
          const auto bits = random_bits<uint16_t>(random, 5, 10);
          scale = f16_value(bits);
          put(bits);
        }
        const auto q = static_cast<int8_t>(random.integer(-128, 127));
        rows.values.push_back(scale * q);
        put(q);
      }
    }
  }
  return rows;
}

constexpr DType kAllTypes[] = {DType::f32, DType::f16, DType::bf16, DType::q8_0};

int32_t random_width(Random& random, DType dtype) {
  return dtype == DType::q8_0 ? 32 * random.integer(1, 4) : random.integer(1, 70);
}

TEST_CASE("matmul is the sum of products, and writes its columns only") {
  for (const CpuKernels* table : supported_kernels()) {
    for (const DType dtype : kAllTypes) {
      CAPTURE(std::string_view(table->isa));
      CAPTURE(info(dtype).name);
      Random random(1);
      for (int trial = 0; trial < 200; ++trial) {
        const int64_t n_in = random_width(random, dtype);
        const int64_t n_out = random.integer(1, 21);
        const int64_t n_rows = random.integer(1, 9);
        const int64_t begin = random.integer(0, static_cast<int32_t>(n_out));
        const int64_t end =
            random.integer(static_cast<int32_t>(begin), static_cast<int32_t>(n_out));
        const int64_t stride = n_out + random.integer(0, 3);
        const bool add = random.flip();
        CAPTURE(n_in);
        CAPTURE(n_rows);
        CAPTURE(begin);
        CAPTURE(end);
        const Rows w = random_rows(random, dtype, n_out, n_in);
        const std::vector<float> x = random.reals(1 + n_rows * n_in);  // offset by 4 bytes
        const std::vector<float> bias = random.flip() ? random.reals(n_out) : std::vector<float>();
        // One more row on either side that must not change.
        const std::vector<float> before = random.reals((n_rows + 2) * stride);
        std::vector<float> y = before;
        table->of(dtype).matmul({.y = y.data() + stride,
                                 .x = x.data() + 1,
                                 .w = w.data(),
                                 .bias = bias.empty() ? nullptr : bias.data(),
                                 .n_rows = n_rows,
                                 .n_in = n_in,
                                 .w_row_bytes = w.row_bytes,
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
              const double product = double{x[1 + r * n_in + i]} * w.values[o * n_in + i];
              sum += product;
              magnitude += std::abs(product);
            }
            for (const double term : {bias.empty() ? 0.0 : bias[o], add ? before[at] : 0.0}) {
              sum += term;
              magnitude += std::abs(term);
            }
            // On the way to the output a product is rounded once by itself (never with fma), in at
            // most n_in sums of its lane, in 4 sums of 16 lanes, with the bias and with y. The
            // lanes share the n_in terms, so n_in + 6 covers both widths. Weights are exact: an
            // 11-bit scale times 8 bits fits in the 24 bits of a float.
            n_wrong += !(std::abs(y[at] - sum) <= gamma(n_in + 6) * magnitude);
          }
        }
        CHECK(n_wrong == 0);
        CHECK(n_touched == 0);
      }
    }
  }
}

TEST_CASE("an output of matmul has the same bits in any batch or range, with a workspace or not") {
  const Buffer workspace = make_cpu_backend(1, "scalar")->allocate(kMatmulWorkspace * 4);
  for (const CpuKernels* table : supported_kernels()) {
    for (const DType dtype : kAllTypes) {
      CAPTURE(std::string_view(table->isa));
      CAPTURE(info(dtype).name);
      Random random(2);
      for (int trial = 0; trial < 30; ++trial) {
        // Many rows of whole vectors, as in attention, have a kernel of their own, and sums over
        // long rows are computed in parts.
        const bool many = trial >= 20 && trial < 28;
        const bool is_long = trial >= 28;
        int64_t n_in = many ? 32 * random.integer(1, 5) : random_width(random, dtype);
        if (is_long) n_in += 32 * random.integer(48, 120);
        const int64_t n_out = random.integer(is_long ? 65 : 1, is_long ? 70 : 27);
        const int64_t n_rows = random.integer(1, many ? 110 : 16);
        const Rows w = random_rows(random, dtype, n_out, n_in);
        const std::vector<float> x = random.reals(n_rows * n_in);
        const std::vector<float> bias = random.reals(n_out);
        Matmul m{.y = nullptr,
                 .x = x.data(),
                 .w = w.data(),
                 .bias = trial % 2 == 0 && !many ? bias.data() : nullptr,
                 .n_rows = n_rows,
                 .n_in = n_in,
                 .w_row_bytes = w.row_bytes,
                 .y_stride = n_out,
                 .add = trial % 4 < 2 && !many};
        const std::vector<float> before = random.reals(n_rows * n_out);
        std::vector<float> whole = before;
        m.y = whole.data();
        m.workspace = workspace.as<float>();
        table->of(dtype).matmul(m, 0, n_out);
        m.workspace = nullptr;

        int n_different = 0;
        const auto check = [&](int64_t row, int64_t rows, int64_t begin, int64_t end) {
          std::vector<float> part = before;
          m.x = x.data() + row * n_in;
          m.y = part.data() + row * n_out;
          m.n_rows = rows;
          table->of(dtype).matmul(m, begin, end);
          for (int64_t r = row; r < row + rows; ++r) {
            for (int64_t o = begin; o < end; ++o) {
              n_different += !same_bits(part[r * n_out + o], whole[r * n_out + o]);
            }
          }
        };
        for (int64_t row = 0; row < n_rows; ++row) {
          for (int64_t o = 0; o < n_out; ++o) check(row, 1, o, o + 1);
          check(row, n_rows - row, 0, n_out);
          check(row, n_rows - row, std::min<int64_t>(row, n_out), n_out);
        }
        CHECK(n_different == 0);
      }
    }
  }
}

TEST_CASE("add_rows is the weighted sum of rows, in order") {
  for (const CpuKernels* table : supported_kernels()) {
    for (const DType dtype : kAllTypes) {
      CAPTURE(std::string_view(table->isa));
      CAPTURE(info(dtype).name);
      Random random(3);
      for (int trial = 0; trial < 200; ++trial) {
        const int64_t n =
            dtype == DType::q8_0 ? random_width(random, dtype) : random.integer(1, 150);
        const bool many = trial % 8 == 0;
        const int64_t n_rows = random.integer(1, many ? 80 : 20);
        CAPTURE(n);
        CAPTURE(n_rows);
        const Rows rows = random_rows(random, dtype, n_rows, n);
        const int64_t n_out = random.integer(1, many ? 30 : 6);
        const int64_t p_stride = n_rows + random.integer(0, 3);
        const std::vector<float> p = random.reals(n_out * p_stride);
        const std::vector<float> before = random.reals(n_out * n + 2);
        std::vector<float> y = before;
        const auto add_rows = table->of(dtype).add_rows;
        AddRows a{.y = y.data() + 1,
                  .p = p.data(),
                  .rows = rows.data(),
                  .n_out = n_out,
                  .n_rows = n_rows,
                  .n = n,
                  .row_bytes = rows.row_bytes,
                  .p_stride = p_stride};
        add_rows(a);

        int n_wrong = 0;
        for (int64_t r = 0; r < n_out; ++r) {
          for (int64_t c = 0; c < n; ++c) {
            double sum = before[1 + r * n + c];
            double magnitude = std::abs(sum);
            for (int64_t i = 0; i < n_rows; ++i) {
              const double product = double{p[r * p_stride + i]} * rows.values[i * n + c];
              sum += product;
              magnitude += std::abs(product);
            }
            // A product is rounded by itself and in at most n_rows sums.
            n_wrong += !(std::abs(y[1 + r * n + c] - sum) <= gamma(n_rows + 1) * magnitude);
          }
        }
        CHECK(n_wrong == 0);
        CHECK(same_bits(y.front(), before.front()));
        CHECK(same_bits(y.back(), before.back()));

        // Attention processes the cache in pieces, and a row does not depend on the others.
        const int64_t half = random.integer(0, static_cast<int32_t>(n_rows));
        std::vector<float> pieces = before;
        for (a.n_out = 1; a.p < p.data() + n_out * p_stride; a.p += p_stride) {
          a.y = pieces.data() + 1 + (a.p - p.data()) / p_stride * n;
          AddRows part = a;
          part.n_rows = half;
          add_rows(part);
          part.p += half;
          part.rows += half * rows.row_bytes;
          part.n_rows = n_rows - half;
          add_rows(part);
        }
        CHECK(same_bits(pieces, y));
      }
    }
  }
}

}  // namespace
}  // namespace h2o
