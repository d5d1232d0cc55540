// Operations between the matrices, on the test device, compared with double: all operations of a
// pass except matmul and attend. Bounds hold for any order of a sum, and for each common way to
// evaluate a function.
#include <doctest/doctest.h>

#include <functional>
#include <numbers>

#include "bounds.h"

namespace h2o {
namespace {

// Exponentials are clamped at e^-70, which is negligible against numbers of order one.
constexpr double kNegligible = 1e-29;

struct Size {
  int64_t rows, cols;
};

// Rows shorter and longer than a warp and a block, of whole vectors and not.
constexpr Size kSizes[] = {{1, 1},    {3, 1},    {1, 5},    {2, 31},  {7, 32},
                           {40, 33},  {1, 48},   {5, 127},  {9, 192}, {1, 1000},
                           {3, 1024}, {9, 4096}, {3, 4099}, {2, 8192}};

// y, or x for in-place operations, as computed by the device.
struct Run {
  std::unique_ptr<Backend> backend = test_backend(2);

  template <class Operation>
  std::vector<float> operator()(const Size& size, const std::vector<float>& x,
                                const Operation& operation) {
    DeviceMatrix matrix(*backend, x, size.rows, size.cols);
    run_rows(*backend, size.rows, [&](const Batch&) { operation(matrix); });
    return matrix.read();
  }
};

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

// Has all signs and sizes.
std::vector<float> inputs(Random& random, const Size& size) {
  std::vector<float> x = random.reals(size.rows * size.cols, -6, 6);
  constexpr float kSpecial[] = {0, -200, 200, -1e-6f, -30, 30};
  for (size_t i = 0; i < std::min(x.size(), std::size(kSpecial)); ++i) {
    if (x.size() > 5) x[i * (x.size() / 6)] = kSpecial[i];
  }
  return x;
}

// Applies an operation in place to rows of every size; check(x, y) returns the error relative to
// its bound.
template <class Operation>
void check_in_place(const Operation& operation,
                    const std::function<double(double x, double y)>& check) {
  Run run;
  Random random(1);
  for (const Size& size : kSizes) {
    CAPTURE(size.rows);
    CAPTURE(size.cols);
    const std::vector<float> x = inputs(random, size);
    const std::vector<float> y = run(size, x, [&](const Tensor& t) { operation(*run.backend, t); });
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) worst = std::max(worst, check(x[i], y[i]));
    CHECK(worst <= 1);
  }
}

TEST_CASE("relu") {
  check_in_place([](Backend& b, const Tensor& x) { b.relu(x); },
                 [](double x, double y) { return in_bounds(y, std::max(x, 0.0), 0); });
}

TEST_CASE("relu_squared") {
  check_in_place([](Backend& b, const Tensor& x) { b.relu_squared(x); },
                 [](double x, double y) {
                   const double expected = std::pow(std::max(x, 0.0), 2);
                   return in_bounds(y, expected, kUnit * expected);
                 });
}

TEST_CASE("gelu_tanh") {
  check_in_place(
      [](Backend& b, const Tensor& x) { b.gelu_tanh(x); },
      [](double x, double y) {
        const double z = 2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
        const double expected = x * sigmoid(z);
        // x / (1 + e^-z): z takes five roundings and two rounded constants, amplified by |z| in
        // the exponential; then a sum, a quotient of up to two places and a product. As x / 2 (1 +
        // tanh(z / 2)): a tanh accurate to one place, and rounding near 1.
        const double relative = 8 * std::abs(z) * kUnit + power_error(z) + 8 * kUnit;
        return in_bounds(y, expected,
                         relative * std::abs(expected) + (4 * kUnit + kNegligible) * std::abs(x));
      });
}

TEST_CASE("gelu_erf") {
  check_in_place([](Backend& b, const Tensor& x) { b.gelu_erf(x); },
                 [](double x, double y) {
                   const double t = x / std::numbers::sqrt2;
                   const double expected = x / 2 * (1 + std::erf(t));
                   // t has two roundings and erf a slope of 2 / sqrt(pi) e^-t^2; erf is accurate to
                   // two places, of two units each; 1 + erf, a product and the halving round once
                   // each.
                   const double slope = 1.13 * std::exp(-t * t) * std::abs(t);
                   return in_bounds(y, expected, std::abs(x) / 2 * (2 * slope + 4 + 2 + 2) * kUnit);
                 });
}

// Applies an operation to up and gate of every size; check(gate, up, y) returns the error relative
// to its bound.
template <class Operation>
void check_gated(const Operation& operation,
                 const std::function<double(double gate, double up, double y)>& check) {
  Run run;
  Random random(2);
  for (const Size& size : kSizes) {
    CAPTURE(size.rows);
    CAPTURE(size.cols);
    const std::vector<float> gate = inputs(random, size);
    const std::vector<float> up = random.reals(size.rows * size.cols, -9, 9);
    const DeviceMatrix device_gate(*run.backend, gate, size.rows, size.cols);
    const std::vector<float> y =
        run(size, up, [&](const Tensor& t) { operation(*run.backend, t, device_gate); });
    double worst = 0;
    for (size_t i = 0; i < y.size(); ++i) worst = std::max(worst, check(gate[i], up[i], y[i]));
    CHECK(worst <= 1);
  }
}

TEST_CASE("swiglu") {
  check_gated([](Backend& b, const Tensor& up,
                 const Tensor& gate) { b.apply_gate(Gate::swiglu, up, gate); },
              [](double gate, double up, double y) {
                const double expected = gate * sigmoid(gate) * up;
                // An exponential, a sum, a quotient of up to two places, two products.
                return in_bounds(y, expected,
                                 (power_error(gate) + 8 * kUnit) * std::abs(expected) +
                                     kNegligible * std::abs(gate * up));
              });
}

TEST_CASE("swiglu_clamped") {
  check_gated([](Backend& b, const Tensor& up,
                 const Tensor& gate) { b.apply_gate(Gate::swiglu_clamped, up, gate); },
              [](double gate, double up, double y) {
                const double g = std::min(gate, 7.0), u = std::clamp(up, -7.0, 7.0);
                const double expected = (u + 1) * g * sigmoid(1.702 * g);
                // 1.702 is rounded, and the argument; then as swiglu, and a sum of up and 1.
                const double relative =
                    2 * std::abs(1.702 * g) * kUnit + power_error(1.702 * g) + 9 * kUnit;
                return in_bounds(
                    y, expected,
                    relative * std::abs(expected) + kNegligible * std::abs(g * (u + 1)));
              });
}

TEST_CASE("geglu") {
  check_gated(
      [](Backend& b, const Tensor& up, const Tensor& gate) { b.apply_gate(Gate::geglu, up, gate); },
      [](double x, double up, double y) {
        const double z = 2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
        const double expected = x * sigmoid(z) * up;
        // gelu_tanh, and a product.
        const double relative = 8 * std::abs(z) * kUnit + power_error(z) + 9 * kUnit;
        return in_bounds(
            y, expected,
            relative * std::abs(expected) + (4 * kUnit + kNegligible) * std::abs(x * up));
      });
}

TEST_CASE("softcap") {
  for (const float cap : {0.5f, 50.0f}) {
    CAPTURE(cap);
    check_in_place([=](Backend& b, const Tensor& x) { b.softcap(x, cap); },
                   [=](double x, double y) {
                     const double expected = cap * std::tanh(x / cap);
                     // The argument's relative errors, of two roundings, are at most those of the
                     // result; a quotient of two polynomials with six and three steps, and a
                     // product.
                     return in_bounds(y, expected, 16 * kUnit * std::abs(expected));
                   });
  }
}

TEST_CASE("clamp") {
  check_in_place([](Backend& b, const Tensor& x) { b.clamp(x, 1.25f); },
                 [](double x, double y) { return in_bounds(y, std::clamp(x, -1.25, 1.25), 0); });
}

TEST_CASE("xielu") {
  const Xielu f{.alpha_p = 1.7f, .alpha_n = 0.9f, .beta = 0.5f, .eps = -1e-6f};
  check_in_place([&](Backend& b, const Tensor& x) { b.xielu(x, f); },
                 [&](double x, double y) {
                   const double power = std::expm1(std::min(x, double{f.eps}));
                   const double bent = x > 0 ? f.alpha_p * x * x : f.alpha_n * (power - x);
                   const double expected = f.beta * x + bent;
                   // e^x - 1 to two places; a difference, two products and a sum, of terms of
                   // which none is larger than these.
                   const double terms =
                       x > 0 ? expected
                             : (f.beta + f.alpha_n) * std::abs(x) + f.alpha_n * std::abs(power);
                   return in_bounds(y, expected, 6 * kUnit * terms);
                 });
}

TEST_CASE("rotate") {
  const auto backend = test_backend(2);
  constexpr int64_t kHead = 10, kHalf = 3;  // the last dimensions are not rotated
  Random random(7);
  const std::vector<float> frequencies = {1, 0.31f, 0.02f};
  const DeviceMatrix table(*backend, frequencies, 1, kHalf);
  Batch batch;
  for (const int32_t position : {0, 5, 4095}) {
    batch.add(batch.n_rows(), position, std::vector<int32_t>(position == 5 ? 3 : 1));
  }
  const int64_t n = batch.n_rows();
  for (const RopeLayout layout : {RopeLayout::pairs, RopeLayout::halves}) {
    for (const auto& [n_q, n_k] : {std::pair<int64_t, int64_t>{1, 1}, {6, 2}}) {
      const std::vector<float> before[] = {random.reals(n * n_q * kHead, -6, 6),
                                           random.reals(n * n_k * kHead, -6, 6)};
      const DeviceMatrix q(*backend, before[0], n, n_q * kHead);
      const DeviceMatrix k(*backend, before[1], n, n_k * kHead);
      backend->run(batch, [&] { backend->rotate(q, k, kHead, {layout, table, 1.5f}, batch); });
      const std::vector<float> after[] = {q.read(), k.read()};
      double worst = 0;
      for (int one = 0; one < 2; ++one) {
        const std::vector<float>& x = before[one];
        for (int64_t at = 0; at < std::ssize(x); ++at) {
          const int64_t head = at / kHead * kHead, dimension = at % kHead;
          if (dimension >= 2 * kHalf) {
            REQUIRE(after[one][at] == x[at]);
            continue;
          }
          const bool pairs = layout == RopeLayout::pairs;
          const int64_t i = pairs ? dimension / 2 : dimension % kHalf;
          const bool second = pairs ? dimension % 2 == 1 : dimension >= kHalf;
          const double a = x[head + (pairs ? 2 * i : i)];
          const double b = x[head + (pairs ? 2 * i + 1 : i + kHalf)];
          const int64_t row = at / (std::ssize(x) / n);
          const double angle = static_cast<float>(batch.positions[row]) * frequencies[i];  // in f32
          const double cosine = 1.5 * std::cos(angle), sine = 1.5 * std::sin(angle);
          const double expected = second ? a * sine + b * cosine : a * cosine - b * sine;
          // The angle rounds once if it is not a multiple of a power of two; cosine and sine to two
          // places, and the magnitude; two products and a sum.
          const double bound = (6 + angle) * kUnit * 1.5 * (std::abs(a) + std::abs(b));
          worst = std::max(worst, in_bounds(after[one][at], expected, bound));
        }
      }
      CHECK(worst <= 1);
    }
  }
}

TEST_CASE("copy_heads") {
  const auto backend = test_backend(2);
  Random random(8);
  constexpr int64_t kHeads = 3, kFrom = 40, kTo = 300;
  for (const int64_t n : {1, 2, 35}) {
    for (const int64_t width : {1, 17, 40}) {
      const std::vector<float> x = random.reals(n * kHeads * kFrom, -6, 6);
      const std::vector<float> old = random.reals(kHeads * n * kTo, -6, 6);
      const DeviceMatrix from(*backend, x, n, kHeads * kFrom);
      const DeviceMatrix to(*backend, old, kHeads * n, kTo);
      const Tensor read = from, written = to;
      run_rows(*backend, n, [&](const Batch&) {
        backend->copy_heads({written.floats() + 5, kTo, n * kTo},
                            {read.floats(), kHeads * kFrom, kFrom}, n, kHeads, width);
      });
      const std::vector<float> y = to.read();
      for (int64_t at = 0; at < std::ssize(y); ++at) {
        const int64_t column = at % kTo - 5, row = at / kTo;  // of a head and a row
        const bool copied = column >= 0 && column < width;
        REQUIRE(y[at] == (copied ? x[(row % n * kHeads + row / n) * kFrom + column] : old[at]));
      }
    }
  }
}

TEST_CASE("scale and add") {
  Run run;
  Random random(5);
  for (const Size& size : kSizes) {
    CAPTURE(size.rows);
    CAPTURE(size.cols);
    const std::vector<float> x = inputs(random, size), y = inputs(random, size);
    const DeviceMatrix device_x(*run.backend, x, size.rows, size.cols);
    const std::vector<float> scaled =
        run(size, x, [&](const Tensor& t) { run.backend->scale(t, 0.3f); });
    const std::vector<float> sum =
        run(size, y, [&](const Tensor& t) { run.backend->add(t, device_x); });
    for (size_t i = 0; i < x.size(); ++i) {
      REQUIRE(scaled[i] == x[i] * 0.3f);
      REQUIRE(sum[i] == y[i] + x[i]);
    }
  }
}

TEST_CASE("scale_by_position") {
  const auto backend = test_backend(2);
  constexpr float kScale = 0.1f;
  constexpr int32_t kLength = 7;
  Batch batch;
  for (const int32_t position : {0, 3, 6, 7, 13, 14, 700, 1'000'003}) {
    batch.add(batch.n_rows(), position, std::vector<int32_t>(position == 3 ? 9 : 1));
  }
  Random random(6);
  for (const int64_t n : {1, 31, 256, 1000, 4099}) {
    CAPTURE(n);
    const std::vector<float> x = random.reals(batch.n_rows() * n, -6, 6);
    const DeviceMatrix scaled(*backend, x, batch.n_rows(), n);
    const int32_t offset = random.integer(0, 1);
    backend->run(batch,
                 [&] { backend->scale_by_position(scaled, kScale, kLength, offset, batch); });
    const std::vector<float> y = scaled.read();
    double worst = 0;
    for (int64_t i = 0; i < std::ssize(x); ++i) {
      const int32_t lengths = (batch.positions[i / n] + offset) / kLength;
      const double factor = 1 + double{kScale} * std::log(1.0 + lengths);
      // A logarithm accurate to one place, a product, a sum and the product with x; nothing is
      // rounded below the length.
      const double bound = lengths == 0 ? 0 : 5 * kUnit * std::abs(x[i] * factor);
      worst = std::max(worst, in_bounds(y[i], x[i] * factor, bound));
    }
    CHECK(worst <= 1);
  }
}

TEST_CASE("layer_norm") {
  Run run;
  Random random(3);
  for (const Size& size : kSizes) {
    for (const float offset : {0.0f, 1.0f, 100.0f}) {
      CAPTURE(size.rows);
      CAPTURE(size.cols);
      CAPTURE(offset);
      const int64_t n = size.cols;
      const std::vector<float> x = random.reals(size.rows * n, offset - 1, offset + 1);
      const std::vector<float> weight = random.reals(n), bias = random.reals(n);
      const DeviceMatrix w(*run.backend, weight, 1, n), b(*run.backend, bias, 1, n);
      const DeviceMatrix y(*run.backend, size.rows, n);
      constexpr float kEps = 1e-5f;
      const std::vector<float> in_place = run(size, x, [&](const Tensor& t) {
        run.backend->layer_norm(y, t, {w, b}, kEps);
        run.backend->layer_norm(t, t, {w, b}, kEps);
      });
      const std::vector<float> out = y.read();
      CHECK(same_bits(in_place, out));
      double worst = 0;
      for (int64_t r = 0; r < size.rows; ++r) {
        const std::span row = std::span(x).subspan(r * n, n);
        double mean = 0, magnitude = 0, variance = 0;
        for (const float value : row) mean += value / static_cast<double>(n);
        for (const float value : row) magnitude += std::abs(value) / static_cast<double>(n);
        for (const float value : row) {
          variance += (value - mean) * (value - mean) / static_cast<double>(n);
        }
        // The bound of test_kernels, where the root, the inverse and three operations follow; an
        // inverse root of two places is four units.
        const double shift = gamma(n + 1) * magnitude;
        const double denominator = variance + double{kEps};
        const double scale = 1 / std::sqrt(denominator);
        const double relative =
            (gamma(n + 5) * (variance + shift * shift) + shift * shift) / denominator / 2 +
            gamma(9);
        for (int64_t i = 0; i < n; ++i) {
          const double normal = (row[i] - mean) * scale * weight[i];
          const double moved = shift * scale * std::abs(weight[i]);
          const double bound =
              (std::abs(normal) + moved) * relative + moved + kUnit * std::abs(bias[i]);
          worst = std::max(worst, in_bounds(out[r * n + i], normal + bias[i],
                                            1.01 * bound));  // second order
        }
      }
      CHECK(worst <= 1);
    }
  }
}

TEST_CASE("rms_norm") {
  Run run;
  Random random(4);
  for (const Size& size : kSizes) {
    CAPTURE(size.rows);
    CAPTURE(size.cols);
    const int64_t n = size.cols;
    const std::vector<float> x = random.reals(size.rows * n);
    const std::vector<float> weight = random.reals(n);
    const DeviceMatrix w(*run.backend, weight, 1, n);
    const DeviceMatrix y(*run.backend, size.rows, n);
    constexpr float kEps = 1e-5f;
    const std::vector<float> in_place = run(size, x, [&](const Tensor& t) {
      run.backend->rms_norm(y, t, w, kEps);
      run.backend->rms_norm(t, t, w, kEps);
    });
    const std::vector<float> out = y.read();
    CHECK(same_bits(in_place, out));
    double worst = 0;
    for (int64_t r = 0; r < size.rows; ++r) {
      const std::span row = std::span(x).subspan(r * n, n);
      double squares = 0;
      for (const float value : row) squares += double{value} * value;
      const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + double{kEps});
      // The sum of squares has n roundings, a quotient and a sum; its root halves them. An inverse
      // root of two places, or a root and an inverse, and two products follow.
      const double relative = gamma(n + 3) / 2 + gamma(6);
      for (int64_t i = 0; i < n; ++i) {
        const double expected = row[i] * scale * weight[i];
        worst = std::max(worst, in_bounds(out[r * n + i], expected, relative * std::abs(expected)));
      }
    }
    CHECK(worst <= 1);
  }
}

// Norms of heads have rows for each head of each token: more than Vulkan has workgroups.
TEST_CASE("rms_norm of many rows" * doctest::skip(on_cuda())) {
  constexpr int64_t kRows = 65536 + 3;
  const auto backend = test_backend(2);
  Random random(5);
  const std::vector<float> x = random.reals(kRows);
  DeviceMatrix matrix(*backend, x, kRows, 1);
  const DeviceMatrix w(*backend, std::vector<float>{2}, 1, 1);
  run_rows(*backend, 1, [&](const Batch&) { backend->rms_norm(matrix, matrix, w, 1); });
  const std::vector<float> y = matrix.read();
  double worst = 0;
  for (int64_t i = 0; i < kRows; ++i) {
    const double expected = 2 * x[i] / std::sqrt(1 + double{x[i]} * x[i]);
    worst = std::max(worst, in_bounds(y[i], expected, gamma(10) * std::abs(expected)));
  }
  CHECK(worst <= 1);
}

// Operations before an exception are not left for later, when their memory may be freed.
TEST_CASE("a pass that throws has ended" * doctest::skip(!on_vulkan())) {
  const auto backend = test_backend(2);
  Buffer other = backend->allocate(64);
  const Buffer memory = backend->allocate_host(sizeof(float));
  std::vector<float> one{1};
  Tensor host{reinterpret_cast<std::byte*>(one.data()), DType::f32, 1, 1};
  const Tensor x = backend->upload(host, memory.data());
  Batch batch;
  batch.add(0, 0, std::vector<int32_t>(1));
  batch.want_last();
  const auto half = [&] {
    backend->scale(x, 2);
    throw std::runtime_error("half");
  };
  CHECK_THROWS_AS(backend->run(batch, half), std::runtime_error);
  other = {};  // which waits for what has begun
  CHECK(*memory.as<float>() == 2);

  std::unique_ptr<CapturedGraph> graph;
  CHECK_THROWS_AS(backend->run(batch, graph, half), std::runtime_error);
  DeviceMatrix y(*backend, one, 1, 1);
  for (const float expected : {3.0f, 9.0f}) {
    backend->run(batch, graph, [&] { backend->scale(y, 3); });
    CHECK(y.read() == std::vector<float>{expected});
  }
}

}  // namespace
}  // namespace h2o
