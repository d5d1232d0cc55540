// decode and encode of every instruction set: all f16 and bf16 values, and every kind of f32.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/isa/detect.h"
#include "testing.h"

namespace h2o {
namespace {

// An f16 or bf16 type: the same 16 bits, divided differently.
struct Half {
  DType dtype;
  double (*value)(uint16_t bits);
  uint16_t infinity;  // positive; the finite magnitudes are below it, in order
  double overflow;    // rounds to infinity from here on: half a step above the largest finite value
};

constexpr Half kF16{DType::f16, f16_value, 0x7c00, 65520.0};
constexpr Half kBF16{DType::bf16, bf16_value, 0x7f80, 0x1.ffp127};

// The nearest value, ties to even. Found by search: it shares no arithmetic with the kernels.
uint16_t nearest(const Half& half, float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::abs(double{x});
  if (magnitude >= half.overflow) return sign | half.infinity;
  uint16_t below = 0;
  for (uint16_t step = 0x4000; step != 0; step >>= 1) {
    const uint16_t next = below + step;
    if (next < half.infinity && half.value(next) <= magnitude) below = next;
  }
  if (below + 1 == half.infinity) return sign | below;  // past it, but by less than half a step
  const double down = magnitude - half.value(below);
  const double up = half.value(below + 1) - magnitude;
  const bool round_up = up < down || (up == down && below % 2 == 1);
  return sign | static_cast<uint16_t>(below + round_up);
}

// Every finite value, every midpoint between two, and their f32 neighbors; infinities, NaNs, the
// smallest f32; and random bits.
std::vector<float> interesting(const Half& half) {
  std::vector<float> all;
  const auto add = [&](float x) {
    for (const float sign : {1.0f, -1.0f}) {
      all.push_back(sign * std::nextafter(x, 0.0f));
      all.push_back(sign * x);
      all.push_back(sign * std::nextafter(x, INFINITY));
    }
  };
  for (uint16_t bits = 0; bits + 1 < half.infinity; ++bits) {
    const double low = half.value(bits);
    add(static_cast<float>(low));
    add(static_cast<float>((low + half.value(bits + 1)) / 2));
  }
  add(static_cast<float>(half.value(half.infinity - 1)));
  add(static_cast<float>(half.overflow));
  add(std::numeric_limits<float>::denorm_min());
  add(std::numeric_limits<float>::min());
  add(std::numeric_limits<float>::max());
  for (const uint32_t nan : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0x7f801fffu, 0x7f802000u}) {
    all.push_back(std::bit_cast<float>(nan));
    all.push_back(std::bit_cast<float>(nan | 0x80000000));
  }
  Random random(1);
  for (int i = 0; i < 100'000; ++i) all.push_back(std::bit_cast<float>(random.bits()));
  // The exponents where rounding is not trivial.
  for (int i = 0; i < 100'000; ++i) {
    all.push_back(std::ldexp(random.real(-1, 1), random.integer(-26, 17)));
  }
  return all;
}

TEST_CASE("every f16 and bf16 decodes to its value") {
  std::vector<uint16_t> all(65536);
  for (uint32_t bits = 0; bits < 65536; ++bits) all[bits] = static_cast<uint16_t>(bits);
  const auto* bytes = reinterpret_cast<const std::byte*>(all.data());
  for (const CpuKernels* table : supported_kernels()) {
    for (const Half& half : {kF16, kBF16}) {
      CAPTURE(std::string_view(table->isa));
      CAPTURE(info(half.dtype).name);
      std::vector<float> values(all.size());
      const auto check = [&] {
        int n_wrong = 0;
        for (uint32_t bits = 0; bits < 65536; ++bits) {
          const double expected = half.value(static_cast<uint16_t>(bits));
          if (std::isnan(expected)) {
            n_wrong += !std::isnan(values[bits]);
          } else {
            n_wrong += values[bits] != expected || std::signbit(values[bits]) != (bits >> 15 != 0);
          }
        }
        CHECK(n_wrong == 0);
      };
      table->of(half.dtype).decode(values.data(), bytes, 65536);
      check();
      // Again with every element in the tail of some row, at odd addresses.
      std::fill(values.begin(), values.end(), -1.0f);
      for (int64_t i = 0; i < 65536;) {
        const int64_t n = std::min<int64_t>(1 + i % 37, 65536 - i);
        table->of(half.dtype).decode(values.data() + i, bytes + 2 * i, n);
        i += n;
      }
      check();
    }
  }
}

TEST_CASE("f32 decodes to itself and Q8_0 to scale times quant, exactly") {
  Random random(2);
  for (const CpuKernels* table : supported_kernels()) {
    CAPTURE(std::string_view(table->isa));
    for (int64_t n = 1; n <= 70; ++n) {
      std::vector<float> x(n);
      for (float& value : x) value = std::bit_cast<float>(random.bits() & 0xbfffffff);  // no NaN
      std::vector<float> y(n);
      table->f32.decode(y.data(), reinterpret_cast<const std::byte*>(x.data()), n);
      CHECK(same_bits(x, y));
      std::vector<std::byte> copy(n * sizeof(float));
      table->f32.encode(copy.data(), x.data(), n);
      CHECK(std::memcmp(copy.data(), x.data(), copy.size()) == 0);
    }

    // Every finite scale, denormals too; every quant. Their 19 bits fit in an f32.
    int n_wrong = 0;
    for (uint32_t d = 0; d < 65536; ++d) {
      if (!std::isfinite(f16_value(static_cast<uint16_t>(d)))) continue;
      BlockQ8_0 blocks[2];
      for (BlockQ8_0& block : blocks) {
        block.d = {static_cast<uint16_t>(d)};
        for (int8_t& q : block.qs) q = static_cast<int8_t>(random.integer(-128, 127));
      }
      float y[64];
      table->q8_0.decode(y, reinterpret_cast<const std::byte*>(blocks), 64);
      for (int i = 0; i < 64; ++i) {
        n_wrong += y[i] != f16_value(static_cast<uint16_t>(d)) * blocks[i / 32].qs[i % 32];
      }
    }
    CHECK(n_wrong == 0);
    CHECK((table->q5_1.encode == nullptr));  // read-only type
    CHECK((table->q5_1.add_rows == nullptr));
  }
}

// That the scalar table's blocks match gguf-py is tested in Python; q2 and q3, which it does not
// know, in test_archive_types.cpp.
TEST_CASE("encode makes the same blocks on every instruction set") {
  const CpuKernels& scalar = choose_kernels("scalar");
  for (const CpuKernels* table : supported_kernels()) {
    CAPTURE(std::string_view(table->isa));
    for (const DType dtype : {DType::q8_0, DType::q5_0, DType::q4_0, DType::q2, DType::q3}) {
      Random random(5);
      for (int trial = 0; trial < 500; ++trial) {
        const float size = std::ldexp(1.0f, random.integer(-30, 15));
        std::vector<float> x = random.reals(192, -size, size);
        if (trial % 10 == 0) x[random.integer(0, 191)] = trial % 20 == 0 ? NAN : INFINITY;
        if (trial % 7 == 0) std::fill_n(x.begin() + 32, 32, 0.0f);
        std::vector<std::byte> expected(byte_size(dtype, 192));
        std::vector<std::byte> blocks(expected.size());
        scalar.of(dtype).encode(expected.data(), x.data(), 192);
        table->of(dtype).encode(blocks.data(), x.data(), 192);
        CHECK(blocks == expected);
      }
    }
  }
}

TEST_CASE("encode rounds to nearest, ties to even; NaN stays NaN") {
  for (const Half& half : {kF16, kBF16}) {
    const std::vector<float> x = interesting(half);
    std::vector<uint16_t> expected(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      if (!std::isnan(x[i])) expected[i] = nearest(half, x[i]);
    }
    for (const CpuKernels* table : supported_kernels()) {
      CAPTURE(std::string_view(table->isa));
      CAPTURE(info(half.dtype).name);
      std::vector<uint16_t> y(x.size());
      const auto check = [&] {
        int n_wrong = 0;
        for (size_t i = 0; i < x.size(); ++i) {
          if (std::isnan(x[i])) {
            n_wrong += !std::isnan(half.value(y[i])) || std::signbit(x[i]) != (y[i] >> 15 != 0);
          } else {
            n_wrong += y[i] != expected[i];
          }
        }
        CHECK(n_wrong == 0);
      };
      const auto encode = table->of(half.dtype).encode;
      encode(reinterpret_cast<std::byte*>(y.data()), x.data(), std::ssize(y));
      check();
      std::fill(y.begin(), y.end(), 0xaaaa);
      for (int64_t i = 0; i < std::ssize(y);) {
        const int64_t n = std::min<int64_t>(1 + i % 37, std::ssize(y) - i);
        encode(reinterpret_cast<std::byte*>(y.data() + i), x.data() + i, n);
        i += n;
      }
      check();
    }
  }
}

TEST_CASE("decode and encode write exactly n elements") {
  Random random(3);
  for (const CpuKernels* table : supported_kernels()) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      CAPTURE(std::string_view(table->isa));
      CAPTURE(info(dtype).name);
      for (int64_t n = 1; n <= 70; ++n) {
        const std::vector<float> x = random.reals(n);
        const int64_t size = byte_size(dtype, n);
        std::vector<std::byte> y(size + 8, std::byte{0x5a});
        table->of(dtype).encode(y.data() + 4, x.data(), n);
        std::vector<float> back(n + 2, 7.0f);
        table->of(dtype).decode(back.data() + 1, y.data() + 4, n);
        CHECK(std::count(y.begin(), y.begin() + 4, std::byte{0x5a}) == 4);
        CHECK(std::count(y.end() - 4, y.end(), std::byte{0x5a}) == 4);
        CHECK(back.front() == 7.0f);
        CHECK(back.back() == 7.0f);
      }
    }
  }
}

}  // namespace
}  // namespace h2o
