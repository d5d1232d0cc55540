// Operations that select: rows of tables, rows of a batch, the largest element of a row; on the
// test device, with exact results. And memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>

#include "core/error.h"
#include "device_rig.h"
#include "random_weights.h"

namespace h2o {
namespace {

struct Size {
  int64_t rows, cols;
};
constexpr Size kSizes[] = {{1, 1},  {5, 3},    {40, 33},  {9, 192},
                           {7, 61}, {3, 1024}, {2, 4099}, {11, 50'272}};

// Values are rounded at most once, see cpu/matmul/blocks-inl.h, so results are exact.
TEST_CASE("embed gives rows of every type, and add_positions adds") {
  const auto backend = test_backend();
  Random random(5);
  for (const DType dtype : device_dtypes()) {
    for (const int64_t n_blocks : {1, 3, 8}) {
      const int64_t n = n_blocks * std::max<int64_t>(info(dtype).block_size, 13);
      CAPTURE(info(dtype).name);
      CAPTURE(n);
      constexpr int64_t kTokens = 37;
      constexpr int64_t kLength = 60;
      const std::vector<std::byte> bytes = random_weights(random, dtype, kTokens * n, real_scales);
      std::vector<float> values(kTokens * n);
      choose_kernels("scalar").of(dtype).decode(values.data(), bytes.data(), kTokens * n);
      const std::vector<float> positions = random.reals(kLength * n);
      std::vector<Buffer> owner;
      const Tensor table = backend->upload(tensor_of(bytes, dtype, kTokens, n), owner);
      const Tensor learned =
          backend->upload({reinterpret_cast<std::byte*>(const_cast<float*>(positions.data())),
                           DType::f32, kLength, n},
                          owner);

      Batch batch;
      for (const auto& [sequence, position, n_rows] :
           {std::tuple{0, 55, 3}, {2, 0, 1}, {1, 7, 20}}) {
        std::vector<int32_t> tokens(n_rows);
        for (int32_t& token : tokens) token = random.integer(0, kTokens - 1);
        batch.add(sequence, position, tokens);
      }
      batch.want_last();
      const DeviceMatrix x(*backend, batch.n_rows(), n);
      const DeviceMatrix sum(*backend, batch.n_rows(), n);
      backend->run(batch, [&] {
        backend->embed(x, table, batch);
        backend->embed(sum, table, batch);
        backend->add_positions(sum, learned, batch);
      });
      const std::vector<float> rows = x.read();
      const std::vector<float> sums = sum.read();
      int n_wrong = 0;
      for (int64_t r = 0; r < batch.n_rows(); ++r) {
        for (int64_t i = 0; i < n; ++i) {
          const float value = values[batch.tokens[r] * n + i];
          n_wrong += rows[r * n + i] != value;
          n_wrong += sums[r * n + i] != value + positions[batch.positions[r] * n + i];
        }
      }
      CHECK(n_wrong == 0);
    }
  }
}

// CUDA copies them through buffers of 8 MiB, each filled by several threads.
TEST_CASE("a large table is uploaded whole") {
  constexpr int64_t kTokens = 1100, kCols = 8192;
  const auto backend = test_backend();
  Random random(6);
  Batch batch;
  std::vector<int32_t> tokens;
  for (int32_t token = 0; token < kTokens; token += 13) tokens.push_back(token);
  batch.add(0, 0, tokens);
  batch.want_last();
  for (const DType dtype : {DType::f16, DType::q8_0}) {
    CAPTURE(info(dtype).name);
    const std::vector<std::byte> bytes =
        random_weights(random, dtype, kTokens * kCols, real_scales);
    REQUIRE(bytes.size() > 8 << 20);
    std::vector<Buffer> owner;
    const Tensor table = backend->upload(tensor_of(bytes, dtype, kTokens, kCols), owner);
    const DeviceMatrix x(*backend, batch.n_rows(), kCols);
    backend->run(batch, [&] { backend->embed(x, table, batch); });
    const std::vector<float> rows = x.read();
    const int64_t row_bytes = std::ssize(bytes) / kTokens;
    std::vector<float> row(kCols);
    int64_t n_wrong = 0;
    for (int64_t r = 0; r < batch.n_rows(); ++r) {
      choose_kernels("scalar").of(dtype).decode(row.data(), &bytes[tokens[r] * row_bytes], kCols);
      n_wrong += !std::equal(row.begin(), row.end(), rows.begin() + r * kCols);
    }
    CHECK(n_wrong == 0);
  }
}

TEST_CASE("gather copies the rows whose logits are requested") {
  const auto backend = test_backend();
  Random random(6);
  for (const Size& size : kSizes) {
    const std::vector<float> values = random.reals(size.rows * size.cols);
    const DeviceMatrix x(*backend, values, size.rows, size.cols);
    Batch batch;
    batch.add(0, 0, std::vector<int32_t>(size.rows));
    for (int32_t row = 0; row < size.rows; row += 2) {
      batch.logits_rows.insert(batch.logits_rows.begin(), row);
    }
    const DeviceMatrix y(*backend, std::ssize(batch.logits_rows), size.cols);
    backend->run(batch, [&] { backend->gather(y, x, batch); });
    std::vector<float> expected;
    for (const int32_t row : batch.logits_rows) {
      const auto begin = values.begin() + row * size.cols;
      expected.insert(expected.end(), begin, begin + size.cols);
    }
    CHECK(same_bits(y.read(), expected));
  }
}

TEST_CASE("argmax is the first of the largest; NaN sorts lowest") {
  const auto backend = test_backend();
  Random random(8);
  for (const Size& size : kSizes) {
    CAPTURE(size.rows);
    CAPTURE(size.cols);
    std::vector<float> values = random.reals(size.rows * size.cols);
    std::vector<int32_t> expected;
    for (int64_t r = 0; r < size.rows; ++r) {
      const auto row = std::span(values).subspan(r * size.cols, size.cols);
      const auto any = [&]() -> float& {
        return row[random.integer(0, static_cast<int32_t>(size.cols) - 1)];
      };
      if (r % 3 == 0) std::ranges::for_each(row, [](float& x) { x = std::round(x); });
      if (r % 4 == 1) any() = NAN;
      if (r % 5 == 2) any() = INFINITY;
      if (r % 7 == 4) std::ranges::fill(row, -INFINITY);
      if (r % 6 == 3) std::ranges::fill(row.first(row.size() * 2 / 3), NAN);
      int32_t best = 0;
      for (int32_t i = 1; i < size.cols; ++i) {
        const bool first_number = std::isnan(row[best]) && !std::isnan(row[i]);
        if (first_number || row[i] > row[best]) best = i;
      }
      expected.push_back(best);
    }
    const DeviceMatrix x(*backend, values, size.rows, size.cols);
    const Buffer tokens = backend->allocate(size.rows * sizeof(int32_t));
    run_rows(*backend, size.rows, [&](const Batch&) { backend->argmax(tokens.as<int32_t>(), x); });
    std::vector<int32_t> actual(size.rows);
    backend->read(actual.data(), tokens.data(), size.rows * sizeof(int32_t));
    CHECK(actual == expected);
  }
}

// The largest of a row by sorting all of it, and the sum of the weights of the others.
LargestLogits largest_of(std::span<const float> row, float temperature, double& rest) {
  std::vector<int32_t> order;
  for (int32_t i = 0; i < std::ssize(row); ++i) {
    if (row[i] > -INFINITY) order.push_back(i);
  }
  std::ranges::stable_sort(order, std::greater<>(), [&](int32_t i) { return row[i]; });
  LargestLogits out{};
  out.n = std::min(static_cast<int32_t>(order.size()), LargestLogits::kMax);
  rest = 0;
  for (int32_t i = 0; i < std::ssize(order); ++i) {
    const float logit = row[order[i]];
    if (i < out.n) {
      out.logits[i] = {order[i], logit};
    } else if (temperature > 0) {
      rest += std::exp((double{logit} - out.logits[0].value) / temperature);
    }
  }
  return out;
}

TEST_CASE("the largest logits come first, ties: the lower token, and the rest is summed" *
          doctest::skip(!on_gpu())) {
  const auto backend = test_backend();
  constexpr int64_t kRows = 9;
  Random random(11);
  for (const int64_t n : {1, 61, 256, 257, 1000, 5003}) {
    CAPTURE(n);
    std::vector<float> values = random.reals(kRows * n, -9, 9);
    Batch batch;
    for (int32_t r = 0; r < kRows; ++r) {
      const auto row = std::span(values).subspan(r * n, n);
      const auto any = [&]() -> float& {
        return row[random.integer(0, static_cast<int32_t>(n) - 1)];
      };
      if (r == 1) std::ranges::for_each(row, [](float& x) { x = std::round(x * 20) / 20; });
      if (r == 2) any() = NAN;
      if (r == 3) any() = INFINITY;
      if (r == 4) std::ranges::fill(row, -INFINITY);
      if (r == 5) std::ranges::fill(row, 0.5f);
      if (r == 6) std::ranges::fill(row.first(row.size() * 9 / 10), -INFINITY);
      if (r == 7) any() = -0.0f;
      if (r == 8) std::ranges::sort(row);
      batch.add(r, 0, std::vector<int32_t>(1));
      batch.want_last();
      batch.temperatures.push_back(r % 3 == 1 ? 0 : random.real(0.5f, 2));
    }
    const DeviceMatrix x(*backend, values, kRows, n);
    const Buffer memory = backend->allocate(kRows * sizeof(LargestLogits));
    auto* const to = memory.as<LargestLogits>();
    backend->run(batch, [&] { backend->select_largest(to, x, batch); });
    std::vector<LargestLogits> found(kRows);
    backend->read(found.data(), to, kRows * sizeof(LargestLogits));
    for (int32_t r = 0; r < kRows; ++r) {
      CAPTURE(r);
      double rest = 0;
      const float temperature = batch.temperatures[r];
      const LargestLogits expected =
          largest_of(std::span(values).subspan(r * n, n), temperature, rest);
      const bool too_many = r == 5 && n > 1024;  // all are equal
      CHECK(found[r].n == (too_many ? -1 : expected.n));
      for (int32_t i = 0; i < found[r].n; ++i) {
        CHECK(found[r].logits[i].token == expected.logits[i].token);
        CHECK(found[r].logits[i].value == expected.logits[i].value);
      }
      if (too_many || r == 3) continue;  // with an infinity there are no weights
      CHECK(std::abs(found[r].rest - rest) <= rest * 0x1p-13);
    }
  }
}

TEST_CASE("memory is zeroed, and reads return what was written") {
  const auto backend = test_backend();
  Random random(7);
  for (const int64_t n : {1, 17, 100'003}) {
    for (const Buffer& buffer : {backend->allocate(n), backend->allocate(3 * n)}) {
      std::vector<std::byte> bytes(n, std::byte{1});
      backend->read(bytes.data(), buffer.data(), n);
      CHECK(std::ranges::count(bytes, std::byte{0}) == n);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.bits());
      backend->write(buffer.data(), bytes.data(), n);
      std::vector<std::byte> back(n);
      backend->read(back.data(), buffer.data(), n);
      CHECK(back == bytes);
    }
    const Buffer host = backend->allocate_host(n);
    CHECK(std::count(host.data(), host.data() + n, std::byte{0}) == n);
  }
  CHECK_THROWS_AS(backend->allocate(size_t{1} << 50), OutOfMemory);
  CHECK_NOTHROW(backend->allocate(1 << 20));
}

}  // namespace
}  // namespace h2o
