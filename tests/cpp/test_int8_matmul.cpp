// Matmul kernels on rows rounded to 8 bits: exact where nothing is rounded, bit-identical on every
// instruction set. The rounding error is tested in Python, against gguf's decoders.
#include <doctest/doctest.h>

#include <cstring>

#include "cpu/cpu_backend.h"
#include "cpu/isa/detect.h"
#include "cpu/matmul/interleave.h"
#include "testing.h"

namespace h2o {
namespace {

struct Type {
  DType dtype;
  std::vector<int64_t> halves;  // offsets of the f16 numbers of a block
  uint16_t unit = 0x3c00;       // scale that makes elements integers, as f16: 1
};

const Type kTypes[] = {
    {DType::q4_0, {0}},           {DType::q4_1, {0, 2}},
    {DType::q5_0, {0}},           {DType::q5_1, {0, 2}},
    {DType::q8_0, {0}},           {DType::q2_k, {80, 82}},
    {DType::q3_k, {108}},         {DType::q4_k, {0, 2}},
    {DType::q5_k, {0, 2}},        {DType::q6_k, {208}},
    {DType::iq4_nl, {0}},         {DType::iq4_xs, {0}},
    {DType::mxfp4, {}},           {DType::iq1_m, {}},
    {DType::iq3_s, {0}},          {DType::iq3_xxs, {0}, 0x4400},
    {DType::iq1_s, {0}, 0x4800},  {DType::iq2_xxs, {0}, 0x4800},
    {DType::iq2_xs, {0}, 0x4800}, {DType::iq2_s, {0}, 0x4800},
    {DType::tq1_0, {52}},         {DType::tq2_0, {64}},
    {DType::nvfp4, {}},
};

// Sets scales so that the elements of blocks are integers.
void set_scales(std::vector<std::byte>& blocks, const Type& type) {
  for (int64_t i = 0; i < std::ssize(blocks); i += info(type.dtype).block_bytes) {
    for (const int64_t at : type.halves)
      std::memcpy(&blocks[i + at], &type.unit, sizeof(type.unit));
    if (type.dtype == DType::mxfp4) blocks[i] = std::byte{128};
    for (int64_t at = 0; at < 4 && type.dtype == DType::nvfp4; ++at)
      blocks[i + at] = std::byte{0x40};
    if (type.dtype == DType::iq1_m) {  // 0x4800, in the high bits of four words
      for (const int64_t at : {49, 51, 53}) blocks[i + at] &= std::byte{15};
      blocks[i + 53] |= std::byte{0x80};
      blocks[i + 55] = (blocks[i + 55] & std::byte{15}) | std::byte{0x40};
    }
  }
}

// Blocks of random bits.
std::vector<std::byte> random_weights(Random& random, const Type& type, int64_t n) {
  std::vector<std::byte> bytes(byte_size(type.dtype, n));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.bits());
  set_scales(bytes, type);
  return bytes;
}

// Integers with a maximum of 127 in every 32, so that the scale is 1 and nothing is rounded; the
// others are small, so that sums stay below 2^24.
std::vector<float> random_integers(Random& random, int64_t n) {
  std::vector<float> x(n);
  for (float& value : x) value = static_cast<float>(random.integer(-3, 3));
  for (int64_t i = 0; i < n; i += 32) x[i + random.integer(0, 31)] = random.flip() ? 127 : -127;
  return x;
}

// y[n_rows, n_out], of which columns [begin, end) are written: from weights in rows and, if `begin`
// allows it, from interleaved ones, which must be bit-identical.
void multiply(const CpuKernels& table, DType dtype, Matmul m, int64_t begin, int64_t end) {
  const TypeKernels& type = table.of(dtype);
  std::vector<int8_t> q(m.n_rows * m.n_in);
  std::vector<float> scales(m.n_rows * m.n_in / 32);
  std::vector<int32_t> sums(m.n_rows * m.n_in / type.int8_group);
  const Int8Rows x{q.data(), scales.data(), sums.data(), m.n_rows, m.n_in, type.int8_group};
  table.quantize_rows(x, m.x, 0, m.n_rows);
  const auto backend = make_cpu_backend(1, "scalar");
  const Buffer workspace = backend->allocate(kInt8Workspace);
  std::vector<float> again(m.y, m.y + m.n_rows * m.y_stride);
  type.int8_matmul(m, x, begin, end, workspace.data());
  if (begin % kInterleaved != 0 || type.interleaved_matmul == nullptr) return;
  const Tensor rows{const_cast<std::byte*>(m.w), dtype, m.y_stride, m.n_in};
  const Buffer buffer = backend->allocate(interleaved_bytes(rows));
  const Tensor interleaved{buffer.data(), dtype, rows.rows, rows.cols, true};
  for (int64_t i = 0; i * kInterleaved < rows.rows; ++i) {
    interleave(interleaved, rows, i, type.unpack);
  }
  const std::span<const float> expected(m.y, again.size());
  m.y = again.data();
  m.w = interleaved.data;
  m.w_row_bytes = interleaved.row_bytes();
  type.interleaved_matmul(m, x, begin, end, workspace.data());
  CHECK(same_bits(again, expected));
}

TEST_CASE("int8_matmul is exact where x needs no rounding, and writes its columns only") {
  for (const CpuKernels* table : supported_kernels()) {
    for (const Type& type : kTypes) {
      CAPTURE(std::string_view(table->isa));
      CAPTURE(info(type.dtype).name);
      Random random(1);
      for (int trial = brief() ? 7 : 0; trial < 12; ++trial) {
        // The last ones are deeper than a panel.
        const int64_t n_in = info(type.dtype).block_size * (trial < 10 ? random.integer(1, 3) : 1) +
                             (trial < 10 ? 0 : kInt8Depth);
        const int64_t n_out = random.integer(1, 64);
        const int64_t n_rows = random.integer(1, trial % 3 == 0 ? 35 : 9);
        int64_t begin = random.integer(0, static_cast<int32_t>(n_out));
        if (random.flip()) begin -= begin % kInterleaved;
        const int64_t end =
            random.integer(static_cast<int32_t>(begin), static_cast<int32_t>(n_out));
        const bool add = random.flip();
        CAPTURE(n_in);
        CAPTURE(n_rows);
        const std::vector<std::byte> w = random_weights(random, type, n_out * n_in);
        std::vector<float> values(n_out * n_in);
        table->of(type.dtype).decode(values.data(), w.data(), n_out * n_in);
        const std::vector<float> x = random_integers(random, n_rows * n_in);
        const std::vector<float> bias =
            random.flip() ? random_integers(random, 64) : std::vector<float>();
        const std::vector<float> before = random_integers(random, n_rows * n_out * 32);
        std::vector<float> y = before;
        multiply(*table, type.dtype,
                 {.y = y.data(),
                  .x = x.data(),
                  .w = w.data(),
                  .bias = bias.empty() ? nullptr : bias.data(),
                  .n_rows = n_rows,
                  .n_in = n_in,
                  .w_row_bytes = byte_size(type.dtype, n_in),
                  .y_stride = n_out,
                  .add = add},
                 begin, end);
        int n_wrong = 0;
        for (int64_t r = 0; r < n_rows; ++r) {
          for (int64_t o = 0; o < n_out; ++o) {
            double expected = before[r * n_out + o];
            if (o >= begin && o < end) {
              if (!add) expected = 0;
              if (!bias.empty()) expected += bias[o];
              for (int64_t i = 0; i < n_in; ++i) {
                expected += double{x[r * n_in + i]} * values[o * n_in + i];
              }
            }
            n_wrong += y[r * n_out + o] != expected;
          }
        }
        CHECK(n_wrong == 0);
      }
    }
  }
}

TEST_CASE("int8_matmul gives the same bits on every instruction set, in every batch and range") {
  for (const CpuKernels* table : supported_kernels()) {
    for (const Type& type : kTypes) {
      CAPTURE(std::string_view(table->isa));
      CAPTURE(info(type.dtype).name);
      Random random(2);
      // More than a panel's depth and, for blocks of 32, not a multiple of 256.
      const int64_t n_in = kInt8Depth + 256 + (info(type.dtype).block_size == 32 ? 64 : 0);
      const int64_t n_out = 45;
      const int64_t n_rows = 19;  // for AMX, a whole tile and the beginning of another
      const std::vector<std::byte> w = random_weights(random, type, n_out * n_in);
      const std::vector<float> x = random.reals(n_rows * n_in);
      Matmul m{.y = nullptr,
               .x = x.data(),
               .w = w.data(),
               .bias = nullptr,
               .n_rows = n_rows,
               .n_in = n_in,
               .w_row_bytes = byte_size(type.dtype, n_in),
               .y_stride = n_out,
               .add = false};
      std::vector<float> whole(n_rows * n_out);
      m.y = whole.data();
      multiply(*supported_kernels().back(), type.dtype, m, 0, n_out);
      for (int64_t row = 0; row < n_rows; row += brief() ? 3 : 1) {
        m.n_rows = n_rows - row;
        m.x = x.data() + row * n_in;
        std::vector<float> part(m.n_rows * n_out);
        m.y = part.data();
        const int64_t middle = random.integer(0, n_out / kInterleaved) * kInterleaved;
        multiply(*table, type.dtype, m, 0, middle);
        multiply(*table, type.dtype, m, middle, n_out);
        CHECK(same_bits(part, std::span(whole).subspan(row * n_out)));
      }
    }
  }
}

// Products are summed in 16 bits where they fit: here they have the largest possible values.
TEST_CASE("int8_matmul gives the same bits with extreme weights and activations") {
  for (const CpuKernels* table : supported_kernels()) {
    for (const Type& type : kTypes) {
      for (const int byte : {0x00, 0x7f, 0x80, 0xff}) {
        if (brief() && (byte == 0x00 || byte == 0x80)) continue;
        CAPTURE(std::string_view(table->isa));
        CAPTURE(info(type.dtype).name);
        CAPTURE(byte);
        const int64_t n_in = 256;
        const int64_t n_out = 33;
        std::vector<std::byte> w(byte_size(type.dtype, n_out * n_in), static_cast<std::byte>(byte));
        set_scales(w, type);
        const int64_t n_rows = 17;  // with different signs
        std::vector<float> x(n_rows * n_in, 1.0f);
        for (int64_t row = 0; row < n_rows; row += 2) {
          std::fill_n(x.begin() + row * n_in, n_in, -1.0f);
        }
        Matmul m{.y = nullptr,
                 .x = x.data(),
                 .w = w.data(),
                 .bias = nullptr,
                 .n_rows = n_rows,
                 .n_in = n_in,
                 .w_row_bytes = byte_size(type.dtype, n_in),
                 .y_stride = n_out,
                 .add = false};
        std::vector<float> expected(n_rows * n_out), actual(n_rows * n_out);
        m.y = expected.data();
        multiply(*supported_kernels().back(), type.dtype, m, 0, n_out);
        m.y = actual.data();
        multiply(*table, type.dtype, m, 0, n_out);
        CHECK(same_bits(actual, expected));
        m.n_rows = 1;
        for (int64_t row = 0; row < n_rows; ++row) {
          m.x = x.data() + row * n_in;
          m.y = actual.data() + row * n_out;
          multiply(*table, type.dtype, m, 0, n_out);
        }
        CHECK(same_bits(actual, expected));
      }
    }
  }
}

TEST_CASE("a row that is not finite gives NaN and does not affect other rows") {
  for (const CpuKernels* table : supported_kernels()) {
    CAPTURE(std::string_view(table->isa));
    Random random(3);
    const int64_t n_in = 64;
    const Type& type = kTypes[0];
    const std::vector<std::byte> w = random_weights(random, type, n_in);
    constexpr int kRows = 6 + 16;  // for AMX, of two tiles
    std::vector<float> x = random_integers(random, kRows * n_in);
    x[40] = NAN;
    x[n_in + 3] = INFINITY;
    x[2 * n_in + 63] = -INFINITY;
    std::fill_n(x.begin() + 3 * n_in, 32, 1e-40f);  // too small for a reciprocal
    std::fill_n(x.begin() + 4 * n_in, n_in, 0.0f);
    std::copy_n(x.begin(), 6 * n_in, x.end() - 6 * n_in);
    std::vector<float> y(kRows);
    multiply(*table, type.dtype,
             {.y = y.data(),
              .x = x.data(),
              .w = w.data(),
              .bias = nullptr,
              .n_rows = kRows,
              .n_in = n_in,
              .w_row_bytes = byte_size(type.dtype, n_in),
              .y_stride = 1,
              .add = false},
             0, 1);
    for (int row : {0, 1, 2, 16, 17, 18}) CHECK(std::isnan(y[row]));
    std::vector<float> values(n_in);
    table->of(type.dtype).decode(values.data(), w.data(), n_in);
    for (int row = 3; row < kRows; ++row) {
      if (row >= 16 && row < 19) continue;
      double expected = 0;
      for (int64_t i = 0; i < n_in; ++i) {
        if (row % 16 != 3 || i >= 32) expected += double{x[row * n_in + i]} * values[i];
      }
      CHECK(y[row] == expected);
    }
  }
}

// More rows than are rounded at a time, and several threads.
TEST_CASE("the back end multiplies any number of rows") {
  Random random(4);
  const int64_t n_in = 96, n_out = 70, n_rows = 2 * kRoundedRows + 7;
  std::vector<std::byte> w = random_weights(random, kTypes[0], n_out * n_in);
  std::vector<float> values(n_out * n_in);
  choose_kernels("scalar").q4_0.decode(values.data(), w.data(), n_out * n_in);
  std::vector<float> x = random_integers(random, n_rows * n_in);
  std::vector<float> y(n_rows * n_out);
  const auto tensor = [](std::vector<float>& data, int64_t rows, int64_t cols) {
    return Tensor{reinterpret_cast<std::byte*>(data.data()), DType::f32, rows, cols};
  };
  make_cpu_backend(3, "")->matmul(tensor(y, n_rows, n_out), tensor(x, n_rows, n_in),
                                  {{w.data(), DType::q4_0, n_out, n_in}, {}});
  int n_wrong = 0;
  for (int64_t r = 0; r < n_rows; ++r) {
    for (int64_t o = 0; o < n_out; ++o) {
      double expected = 0;
      for (int64_t i = 0; i < n_in; ++i) {
        expected += double{x[r * n_in + i]} * values[o * n_in + i];
      }
      n_wrong += y[r * n_out + o] != expected;
    }
  }
  CHECK(n_wrong == 0);
}

}  // namespace
}  // namespace h2o
