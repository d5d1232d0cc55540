// Mixtures of experts on the test device: results, compared with double.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "device_routes.h"
#include "product_bounds.h"

namespace h2o {
namespace {

TEST_CASE("dispatch copies rows, and combine_add sums them") {
  const auto backend = test_backend(2);
  Random random(2);
  struct Shape {
    int64_t n_rows;
    int32_t n_used;
    int64_t n_cols;
  };
  constexpr Shape kShapes[] = {{1, 1, 1},   {1, 4, 31}, {2, 4, 64},  {3, 3, 1000},
                               {8, 1, 256}, {9, 2, 33}, {70, 3, 513}};
  for (const Shape& shape : kShapes) {
    const int64_t n_rows = shape.n_rows;
    const int32_t n_used = shape.n_used;
    const int64_t n_cols = shape.n_cols;
    CAPTURE(n_rows);
    CAPTURE(n_used);
    CAPTURE(n_cols);
    const int64_t n_copies = n_rows * n_used;
    DeviceRoutes device(*backend, n_rows, 1, n_used);
    std::vector<int32_t> copy_rows(n_copies);
    std::iota(copy_rows.begin(), copy_rows.end(), 0);
    for (size_t i = copy_rows.size(); i > 1; --i) {
      std::swap(copy_rows[i - 1], copy_rows[random.integer(0, static_cast<int32_t>(i) - 1)]);
    }
    const std::vector<float> weights = random.reals(n_copies);
    device.write(weights, copy_rows);
    const std::vector<float> rows = random.reals(n_rows * n_cols);
    const std::vector<float> before = random.reals(n_rows * n_cols);
    const std::vector<float> made = random.reals(n_copies * n_cols);
    const DeviceMatrix x(*backend, rows, n_rows, n_cols), copies(*backend, n_copies, n_cols);
    const DeviceMatrix from(*backend, made, n_copies, n_cols), y(*backend, before, n_rows, n_cols);
    run_rows(*backend, n_rows, [&](const Batch&) {
      backend->dispatch(copies, x, device.routes);
      backend->combine_add(y, from, device.routes);
    });
    const std::vector<float> copied = copies.read(), sums = y.read();
    double worst = 0;
    for (int64_t i = 0; i < n_rows; ++i) {
      for (int64_t c = 0; c < n_cols; ++c) {
        double sum = before[i * n_cols + c], magnitude = std::abs(sum);
        for (int64_t j = i * n_used; j < (i + 1) * n_used; ++j) {
          CHECK(copied[copy_rows[j] * n_cols + c] == rows[i * n_cols + c]);
          const double product = double{weights[j]} * made[copy_rows[j] * n_cols + c];
          sum += product;
          magnitude += std::abs(product);
        }
        // A product and a sum for each copy.
        const double bound = gamma(2 * n_used) * magnitude;
        worst = std::max(worst, in_bounds(sums[i * n_cols + c], sum, bound));
      }
    }
    CHECK(worst <= 1);
  }
}

TEST_CASE("gate_rows") {
  const auto backend = test_backend(2);
  Random random(3);
  for (const auto& [n_rows, n_cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {1, 64}, {5, 33}, {9, 1000}, {40, 130}}) {
    const std::vector<float> before = random.reals(n_rows * n_cols);
    const std::vector<float> gates = random.reals(n_rows, -30, 30);
    const DeviceMatrix x(*backend, before, n_rows, n_cols), gate(*backend, gates, n_rows, 1);
    run_rows(*backend, n_rows, [&](const Batch&) { backend->gate_rows(x, gate); });
    const std::vector<float> y = x.read();
    double worst = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      const double g = gates[i / n_cols];
      const double expected = before[i] / (1 + std::exp(-g));
      // An exponential, a sum, a quotient of up to two places and a product.
      const double relative = power_error(g) + 6 * kUnit;
      worst = std::max(worst, in_bounds(y[i], expected, relative * std::abs(expected)));
    }
    CHECK(worst <= 1);
  }
}

// The type that factors of experts' products are rounded to; see factor_type(). cuBLAS does not
// compute these.
DType expert_factors(const Backend& backend, DType weights, int64_t n_rows, int64_t n_in) {
  if (!on_gpu() || n_rows <= 8) return factor_type(backend, weights, n_rows, n_in);
  return is_quantized(weights) ? DType::f16 : n_in % 8 == 0 ? weights : DType::f32;
}

struct Experts {
  DType dtype;
  int64_t n_in, n_out;
  int32_t n_used;
  std::vector<int32_t> offsets;  // of each expert's copies
  bool integers;                 // see random_integers()

  int64_t n_copies() const { return offsets.back(); }
  int64_t n_experts() const { return std::ssize(offsets) - 1; }
};

// Two products of the copies, the second with a bias and possibly of another type.
void check_experts(Backend& backend, Random& random, const Experts& p) {
  CAPTURE(info(p.dtype).name);
  CAPTURE(p.n_in);
  CAPTURE(p.n_out);
  CAPTURE(p.n_copies());
  CAPTURE(p.integers);
  const int64_t n_rows = p.n_copies() / p.n_used, n_all = p.n_experts() * p.n_out;
  const DType types[] = {p.dtype, random.flip() || p.n_in % 256 != 0 ? p.dtype : DType::q4_k};
  std::vector<Buffer> owner;
  std::vector<std::byte> bytes[2];
  std::vector<float> w[2];
  Affine weights[2];
  for (int i = 0; i < 2; ++i) {
    bytes[i] =
        random_weights(random, types[i], n_all * p.n_in, p.integers ? unit_scales : real_scales);
    w[i].resize(n_all * p.n_in);
    choose_kernels("scalar").of(types[i]).decode(w[i].data(), bytes[i].data(), std::ssize(w[i]));
    weights[i].weight = backend.upload(tensor_of(bytes[i], types[i], n_all, p.n_in), owner);
  }
  const std::vector<float> biases = random_integers(random, n_all);
  const DeviceMatrix device_biases(backend, biases, p.n_experts(), p.n_out);
  weights[1].bias = device_biases;
  const int64_t n_numbers = p.n_copies() * p.n_in;
  const std::vector<float> x =
      p.integers ? random_integers(random, n_numbers) : random.reals(n_numbers);
  const DeviceMatrix device_x(backend, x, p.n_copies(), p.n_in);
  const DeviceMatrix y[] = {{backend, p.n_copies(), p.n_out}, {backend, p.n_copies(), p.n_out}};
  const DeviceMatrix alone(backend, p.n_copies(), p.n_out);
  DeviceRoutes device(backend, n_rows, static_cast<int32_t>(p.n_experts()), p.n_used);
  device.write_offsets(p.offsets);
  const auto rows_of = [](const Tensor& t, int64_t begin, int64_t n) {
    return Tensor{t.row(begin), t.dtype, n, t.cols, t.interleaved};
  };
  const bool few = n_rows <= 8;  // on CUDA each row is then multiplied separately
  run_rows(backend, n_rows, [&](const Batch&) {
    backend.matmul_experts({{y[0], weights[0]}, {y[1], weights[1]}}, device_x, device.routes);
    if (!few) return;
    for (int64_t e = 0; e < p.n_experts(); ++e) {
      const Affine expert{rows_of(weights[1].weight, e * p.n_out, p.n_out),
                          rows_of(weights[1].bias, e, 1)};
      for (int64_t r = p.offsets[e]; r < p.offsets[e + 1]; ++r) {
        backend.matmul(rows_of(alone, r, 1), rows_of(device_x, r, 1), expert);
      }
    }
  });
  if (few) CHECK(same_bits(y[1].read(), alone.read()));

  for (int i = 0; i < 2; ++i) {
    const DType type = expert_factors(backend, types[i], n_rows, p.n_in);
    const std::vector<float> found = y[i].read();
    const std::vector<double> w_errors = weight_errors(w[i], type);
    double worst = 0;
    for (int64_t e = 0; e < p.n_experts(); ++e) {
      for (int64_t r = p.offsets[e]; r < p.offsets[e + 1]; ++r) {
        const std::span row = std::span(x).subspan(r * p.n_in, p.n_in);
        const std::vector<double> errors = row_errors(row, types[i], type);
        for (int64_t o = e * p.n_out; o < (e + 1) * p.n_out; ++o) {
          const double bias = i == 1 ? biases[o] : 0;
          const auto [sum, bound] = exact_product(
              row, errors, std::span(w[i]).subspan(o * p.n_in, p.n_in),
              std::span(w_errors).subspan(o * p.n_in, p.n_in), type, std::abs(bias), p.integers);
          const float y_i = found[r * p.n_out + o - e * p.n_out];
          worst = std::max(worst, in_bounds(y_i, sum + bias, bound));
        }
      }
    }
    CHECK(worst <= 1);
  }
}

// The offsets of n_copies copies divided randomly, usually over few experts.
std::vector<int32_t> random_offsets(Random& random, int32_t n_copies, int32_t n_experts) {
  std::vector<int32_t> offsets(n_experts + 1, n_copies);
  offsets[0] = 0;
  for (int32_t e = 1; e < n_experts; ++e) offsets[e] = random.integer(0, n_copies);
  std::ranges::sort(offsets);
  return offsets;
}

TEST_CASE("products of experts with weights of every type") {
  const auto backend = test_backend(2);
  Random random(4);
  int32_t turn = 0;
  for (const DType dtype : device_dtypes()) {
    const int64_t block = info(dtype).block_size;
    ++turn;
    for (const int32_t n_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 40}) {
      if (brief() && n_rows % 2 == turn % 2) continue;  // types take turns
      const int32_t n_used = random.integer(1, 3);
      const int64_t n_in = block == 1 ? random.integer(1, 200) : block * random.integer(1, 2);
      check_experts(*backend, random,
                    {.dtype = dtype,
                     .n_in = n_rows % 3 == 0 ? n_in : (n_in + 7) / 8 * 8,
                     .n_out = 32 * int64_t{random.integer(1, 2)},
                     .n_used = n_used,
                     .offsets = random_offsets(random, n_rows * n_used, 5),
                     .integers = random.flip()});
    }
  }
}

TEST_CASE("one expert gets all rows, or each row another expert") {
  const auto backend = test_backend(2);
  Random random(5);
  for (const DType dtype : {DType::f32, DType::f16, DType::q4_k, DType::mxfp4}) {
    for (const std::vector<int32_t>& offsets : std::vector<std::vector<int32_t>>{
             {0, 0, 0, 4}, {0, 70, 70, 70}, {0, 1, 2, 3}, {0, 1, 130, 130}}) {
      check_experts(*backend, random, {dtype, 256, 32, 1, offsets, random.flip()});
    }
    // More experts than a warp has lanes, and rows of weights long enough for warps to share.
    check_experts(*backend, random, {dtype, 256, 32, 2, random_offsets(random, 4, 80), false});
    check_experts(*backend, random, {dtype, 256, 32, 2, random_offsets(random, 90, 80), false});
    check_experts(*backend, random, {dtype, 2048, 32, 1, {0, 1, 3}, false});
  }
}

}  // namespace
}  // namespace h2o
