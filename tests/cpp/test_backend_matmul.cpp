// Products with uploaded weights of every type, on the test device, compared with double: of few
// rows with the stored blocks, of many with f16 on tensor cores.
#include <doctest/doctest.h>

#include <array>
#include <functional>
#include <string>
#include <utility>

#include "product_bounds.h"

namespace h2o {
namespace {

struct Problem {
  DType dtype;
  int64_t n_rows, n_in, n_out;
  bool integers;  // exact in 8 bits and, mostly, in f16
};

// y = x w^T + bias and y += it, for rows `first` to first + n_out of a tensor. A repacked copy must
// be bit-identical to the rows in place.
void check_product(Backend& backend, Random& random, const Problem& p) {
  CAPTURE(info(p.dtype).name);
  CAPTURE(p.n_rows);
  CAPTURE(p.n_in);
  CAPTURE(p.n_out);
  CAPTURE(p.integers);
  const int64_t first = random.integer(0, 5);
  const int64_t n_all = first + p.n_out + random.integer(0, 3);
  const std::vector<std::byte> bytes =
      random_weights(random, p.dtype, n_all * p.n_in, p.integers ? unit_scales : real_scales);
  std::vector<float> w(n_all * p.n_in);
  choose_kernels("scalar").of(p.dtype).decode(w.data(), bytes.data(), std::ssize(w));
  std::vector<Buffer> owner;
  const Tensor rows{tensor_of(bytes, p.dtype, n_all, p.n_in).row(first), p.dtype, p.n_out, p.n_in};
  const Tensor weight = backend.upload(rows, owner);

  const std::vector<float> biases = random_integers(random, n_all);
  const Tensor all_biases = backend.upload(
      {reinterpret_cast<std::byte*>(const_cast<float*>(biases.data())), DType::f32, 1, n_all},
      owner);
  const Tensor bias{all_biases.data + first * sizeof(float), DType::f32, 1, p.n_out};

  const std::vector<float> x =
      p.integers ? random_integers(random, p.n_rows * p.n_in) : random.reals(p.n_rows * p.n_in);
  const std::vector<float> before = random_integers(random, p.n_rows * p.n_out);
  const DeviceMatrix device_x(backend, x, p.n_rows, p.n_in);
  const DeviceMatrix plain(backend, p.n_rows, p.n_out), again(backend, p.n_rows, p.n_out);
  const DeviceMatrix biased(backend, p.n_rows, p.n_out);
  const DeviceMatrix added(backend, before, p.n_rows, p.n_out);
  run_rows(backend, p.n_rows, [&](const Batch&) {
    backend.matmul(plain, device_x, {weight, {}});
    backend.matmul(biased, device_x, {weight, bias});
    backend.matmul_add(added, device_x, {weight, bias});
  });
  run_rows(backend, p.n_rows, [&](const Batch&) { backend.matmul(again, device_x, {weight, {}}); });
  const std::vector<float> y = plain.read(), y_biased = biased.read(), y_added = added.read();
  CHECK(same_bits(again.read(), y));
  if (backend.capabilities().mapped_weights) {
    const Tensor in_place = backend.upload(rows, nullptr);
    CHECK(in_place.data == rows.data);
    CHECK(weight.interleaved == (backend.upload_bytes(rows) > 0));
    CHECK(weight.interleaved <= is_quantized(p.dtype));
    run_rows(backend, p.n_rows,
             [&](const Batch&) { backend.matmul(again, device_x, {in_place, {}}); });
    CHECK(same_bits(again.read(), y));
  }

  const DType type = factor_type(backend, p.dtype, p.n_rows, p.n_in);
  const bool in_halves = on_gpu() && is_quantized(p.dtype) && type == DType::f16 &&
                         p.n_rows <= 96 && p.dtype != DType::mxfp4 && !p.integers;
  const std::vector<double> w_errors =
      in_halves ? weight_errors_in_halves(p.dtype, w, bytes) : weight_errors(w, type);
  double worst = 0;
  for (int64_t r = 0; r < p.n_rows; ++r) {
    const std::span row = std::span(x).subspan(r * p.n_in, p.n_in);
    const std::vector<double> errors = row_errors(row, p.dtype, type);
    for (int64_t o = 0; o < p.n_out; ++o) {
      const double b = biases[first + o];
      const double a = before[r * p.n_out + o];
      const int64_t w_row = (first + o) * p.n_in;
      const auto [sum, bound] = exact_product(row, errors, std::span(w).subspan(w_row, p.n_in),
                                              std::span(w_errors).subspan(w_row, p.n_in), type,
                                              std::abs(a) + std::abs(b), p.integers);
      const int64_t at = r * p.n_out + o;
      worst =
          std::max({worst, in_bounds(y[at], sum, bound), in_bounds(y_biased[at], sum + b, bound),
                    in_bounds(y_added[at], sum + b + a, bound)});
    }
  }
  CHECK(worst <= 1);
}

// Row counts at the sizes of blocks of rows or threads, and one more and less.
constexpr int64_t kRows[] = {1, 2, 3, 4, 7, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 130};

TEST_CASE("products with weights of every type") {
  const auto backend = test_backend(2);
  Random random(1);
  int64_t turn = 0;
  for (const DType dtype : device_dtypes()) {
    const int64_t block = info(dtype).block_size;
    ++turn;
    for (const int64_t n_rows : kRows) {
      const int64_t any =
          block == 1 ? random.integer(1, 300) : block * (2 * random.integer(0, 3) + 1);
      // Float rows whose size is a multiple of 16 bytes use other kernels.
      const int64_t n_in = block == 1 && n_rows % 3 != 0 ? (any + 7) / 8 * 8 : any;
      const bool many = n_rows > 33;  // the kinds of numbers take turns
      // 64 reals and 97 integers, or 65 integers and 130 reals; or one kind of each small number.
      if (brief() && many && (n_rows == 64 || n_rows == 97) == (turn % 2 == 0)) continue;
      for (const bool integers : {true, false}) {
        if (many && integers == (n_rows % 2 == 0)) continue;
        if (brief() && !many && integers == ((n_rows + turn) % 2 == 0)) continue;
        check_product(*backend, random, {dtype, n_rows, n_in, random.integer(1, 70), integers});
      }
    }
  }
}

TEST_CASE("products of long rows, and of many") {
  const auto backend = test_backend(2);
  Random random(2);
  int64_t turn = 0;
  for (const DType dtype : device_dtypes()) {
    ++turn;
    for (const bool integers : {true, false}) {
      if (brief() && integers == (turn % 2 == 0)) continue;  // types take turns
      for (const int64_t n_rows : {1, 5, 12, 33}) {
        check_product(*backend, random, {dtype, n_rows, 4096, 24, integers});
      }
      check_product(*backend, random, {dtype, 600, 256, 33, integers});
    }
    check_product(*backend, random, {dtype, 1, 256, 5000, true});
    check_product(*backend, random, {dtype, 20, 256, 1500, true});
    // An odd number of blocks, and more than a kernel's warps process in one turn.
    const int64_t block = info(dtype).block_size;
    if (block > 1) check_product(*backend, random, {dtype, 20, block * 37, 40, false});
  }
}

// Back ends keep converted copies of a product's input, which must not outlive it.
TEST_CASE("a product reads what any operation wrote to its input after another product") {
  constexpr int64_t kCols = 64;
  const auto backend = test_backend(2);
  Random random(3);
  for (const DType dtype : {DType::q8_0, DType::q4_0, DType::f16, DType::bf16, DType::f32}) {
    for (const int64_t n_rows : {2, 5, 40, 130}) {
      const std::vector<std::byte> bytes =
          random_weights(random, dtype, kCols * kCols, real_scales);
      std::vector<Buffer> owner;
      const Tensor weight = backend->upload(tensor_of(bytes, dtype, kCols, kCols), owner);
      const Tensor other = backend->upload(tensor_of(bytes, dtype, kCols, kCols), owner);
      const auto matrix = [&](int64_t rows, int64_t cols) {
        return DeviceMatrix(*backend, random.reals(rows * cols), rows, cols);
      };
      const DeviceMatrix a = matrix(n_rows, kCols), table = matrix(n_rows, kCols);
      const DeviceMatrix twice = matrix(n_rows, 2 * kCols), gate = matrix(n_rows, 1);
      const DeviceMatrix norm = matrix(1, kCols), bias = matrix(1, kCols);
      const DeviceMatrix frequencies = matrix(1, 8);
      using Operation = std::function<void(const DeviceMatrix&, const Batch&)>;
      const std::vector<std::pair<std::string, Operation>> operations = {
          {"embed", [&](auto& x, auto& batch) { backend->embed(x, other, batch); }},
          {"add_positions", [&](auto& x, auto& batch) { backend->add_positions(x, table, batch); }},
          {"scale_by_position",
           [&](auto& x, auto& batch) { backend->scale_by_position(x, 0.5f, 1, 0, batch); }},
          {"rotate",
           [&](auto& x, auto& batch) {
             backend->rotate(x, twice, 32, {RopeLayout::halves, frequencies}, batch);
           }},
          {"copy_heads",
           [&](auto& x, auto&) {
             const Tensor to = x, from = table;
             backend->copy_heads({to.floats(), kCols, 16}, {from.floats() + 3, kCols, 16}, n_rows,
                                 4, 13);
           }},
          {"clamp", [&](auto& x, auto&) { backend->clamp(x, 0.5f); }},
          {"xielu", [&](auto& x, auto&) { backend->xielu(x, {0.8f, 0.8f, 0.5f, -1e-6f}); }},
          {"layer_norm", [&](auto& x, auto&) { backend->layer_norm(x, a, {norm, bias}, 1e-5f); }},
          {"rms_norm", [&](auto& x, auto&) { backend->rms_norm(x, x, norm, 1e-5f); }},
          {"matmul", [&](auto& x, auto&) { backend->matmul(x, a, {other, {}}); }},
          {"matmul_add", [&](auto& x, auto&) { backend->matmul_add(x, a, {other, {}}); }},
          {"relu", [&](auto& x, auto&) { backend->relu(x); }},
          {"relu_squared", [&](auto& x, auto&) { backend->relu_squared(x); }},
          {"gelu_tanh", [&](auto& x, auto&) { backend->gelu_tanh(x); }},
          {"gelu_erf", [&](auto& x, auto&) { backend->gelu_erf(x); }},
          {"apply_gate", [&](auto& x, auto&) { backend->apply_gate(Gate::swiglu, x, a); }},
          {"split_blocks", [&](auto& x, auto&) { backend->split_blocks(x, a, twice, 32); }},
          {"add", [&](auto& x, auto&) { backend->add(x, table); }},
          {"scale", [&](auto& x, auto&) { backend->scale(x, 1.5f); }},
          {"softcap", [&](auto& x, auto&) { backend->softcap(x, 1); }},
          {"gate_rows", [&](auto& x, auto&) { backend->gate_rows(x, gate); }},
          {"gather", [&](auto& x, auto& batch) { backend->gather(x, table, batch); }},
      };
      for (const auto& [name, operation] : operations) {
        CAPTURE(name);
        CAPTURE(info(dtype).name);
        CAPTURE(n_rows);
        const DeviceMatrix x = matrix(n_rows, kCols);
        const DeviceMatrix before(*backend, n_rows, kCols), after(*backend, n_rows, kCols);
        const DeviceMatrix expected(*backend, n_rows, kCols);
        Batch batch;
        batch.add(0, 0, std::vector<int32_t>(n_rows, 3));
        for (int32_t i = 0; i < n_rows; ++i) batch.logits_rows.push_back(i);
        backend->run(batch, [&] {
          backend->matmul(before, x, {weight, {}});
          operation(x, batch);
          backend->matmul(after, x, {weight, {}});
        });
        backend->run(batch, [&] { backend->matmul(expected, x, {weight, {}}); });
        CHECK(same_bits(after.read(), expected.read()));
        CHECK_FALSE(same_bits(before.read(), after.read()));
      }
    }
  }
}

// Integers, whose sums are exact in any order.
TEST_CASE("weights of 16 bits may start at any element" * doctest::skip(!on_gpu())) {
  const auto backend = test_backend();
  Random random(3);
  constexpr int64_t kRows = 20, kIn = 64, kOut = 24;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    CAPTURE(info(dtype).name);
    const std::vector<std::byte> bytes = random_weights(random, dtype, kOut * kIn, unit_scales);
    const Tensor host = tensor_of(bytes, dtype, kOut, kIn);
    const Buffer memory = backend->allocate(backend->upload_bytes(host) + 16);
    const DeviceMatrix x(*backend, random_integers(random, kRows * kIn), kRows, kIn);
    const DeviceMatrix y(*backend, kRows, kOut);
    const auto product = [&](int offset) {
      const Affine w{backend->upload(host, memory.data() + offset), {}};
      run_rows(*backend, kRows, [&](const Batch&) { backend->matmul(y, x, w); });
      return y.read();
    };
    const std::vector<float> expected = product(0);
    for (const int offset : {2, 8}) CHECK(product(offset) == expected);
  }
}

TEST_CASE("products of the same rows are bit-identical to each alone") {
  const auto backend = test_backend(2);
  Random random(4);
  constexpr int64_t kIn = 4096;  // shared by warps if there are few rows of weights
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_k}) {
    const DType types[] = {dtype, dtype, dtype, dtype, DType::q6_k, dtype};
    constexpr int64_t kOuts[] = {70, 5, 24, 33, 7, 1};
    std::vector<Buffer> owner;
    std::vector<std::vector<std::byte>> host;
    std::vector<Affine> weights;
    for (size_t i = 0; i < std::size(kOuts); ++i) {
      host.push_back(random_weights(random, types[i], kOuts[i] * kIn, real_scales));
      weights.push_back(
          {backend->upload(tensor_of(host.back(), types[i], kOuts[i], kIn), owner), {}});
    }
    const std::vector<float> bias = random.reals(kOuts[1]);
    const DeviceMatrix device_bias(*backend, bias, 1, kOuts[1]);
    weights[1].bias = device_bias;
    for (const int64_t n_rows : {1, 3, 9}) {
      CAPTURE(info(dtype).name);
      CAPTURE(n_rows);
      const DeviceMatrix x(*backend, random.reals(n_rows * kIn), n_rows, kIn);
      std::vector<DeviceMatrix> alone, together;
      for (const int64_t n_out : kOuts) {
        alone.emplace_back(*backend, n_rows, n_out);
        together.emplace_back(*backend, n_rows, n_out);
      }
      run_rows(*backend, n_rows, [&](const Batch&) {
        for (size_t i = 0; i < weights.size(); ++i) backend->matmul(alone[i], x, weights[i]);
        const auto product = [&](size_t i) { return Product{together[i], weights[i]}; };
        backend->matmul({product(0), product(1), product(2), product(3), product(4), product(5)},
                        x);
      });
      for (size_t i = 0; i < weights.size(); ++i) {
        CHECK(same_bits(together[i].read(), alone[i].read()));
      }
    }
  }
}

// Each expert has the rows of the copies routed to it: none, one, or more than are rounded at a
// time.
TEST_CASE("products of experts are bit-identical to each alone" * doctest::skip(on_gpu())) {
  Random random(8);
  constexpr int64_t kIn = 256, kOut = 96, kExperts = 5;
  const std::vector<std::vector<int32_t>> routes = {
      {0, 1, 1, 2, 2, 2}, {0, 3, 3, 70, 71, 71}, {0, 0, 600, 700, 701, 1100}};
  for (const DType dtype : {DType::f32, DType::f16, DType::q8_0, DType::q4_k, DType::mxfp4}) {
    for (std::vector<int32_t> offsets : routes) {
      CAPTURE(info(dtype).name);
      CAPTURE(offsets.back());
      const auto backend = test_backend(3);
      const int64_t n_rows = offsets.back();
      std::vector<Buffer> owner;
      std::vector<std::byte> bytes[2];
      Affine weights[2];
      for (int i = 0; i < 2; ++i) {
        bytes[i] = random_weights(random, dtype, kExperts * kOut * kIn, real_scales);
        weights[i].weight =
            backend->upload(tensor_of(bytes[i], dtype, kExperts * kOut, kIn), owner);
      }
      const std::vector<float> biases = random.reals(kExperts * kOut);
      const DeviceMatrix device_biases(*backend, biases, kExperts, kOut);
      weights[1].bias = device_biases;
      const DeviceMatrix x(*backend, random.reals(n_rows * kIn), n_rows, kIn);
      DeviceMatrix alone[] = {{*backend, n_rows, kOut}, {*backend, n_rows, kOut}};
      DeviceMatrix together[] = {{*backend, n_rows, kOut}, {*backend, n_rows, kOut}};
      const Routes all{.n_experts = kExperts,
                       .n_used = 1,
                       .normalized = false,
                       .scale = 1,
                       .weights = nullptr,
                       .copy_rows = nullptr,
                       .offsets = offsets.data()};
      run_rows(*backend, n_rows, [&](const Batch&) {
        backend->matmul_experts({{together[0], weights[0]}, {together[1], weights[1]}}, x, all);
        for (int i = 0; i < 2; ++i) {
          for (int64_t e = 0; e < kExperts; ++e) {
            const auto rows = [](const Tensor& t, int64_t begin, int64_t n) {
              return Tensor{t.row(begin), t.dtype, n, t.cols, t.interleaved};
            };
            const int64_t n = offsets[e + 1] - offsets[e];
            if (n == 0) continue;
            const Affine expert{rows(weights[i].weight, e * kOut, kOut),
                                weights[i].bias ? rows(weights[i].bias, e, 1) : Tensor{}};
            backend->matmul(rows(alone[i], offsets[e], n), rows(x, offsets[e], n), expert);
          }
        }
      });
      for (int i = 0; i < 2; ++i) CHECK(same_bits(together[i].read(), alone[i].read()));
    }
  }
}

// Few columns are also divided by rows, if there are enough threads.
TEST_CASE("products do not depend on the number of threads" * doctest::skip(on_gpu())) {
  Random random(5);
  for (const DType dtype : {DType::q8_0, DType::q4_0, DType::q4_k, DType::f16, DType::f32}) {
    for (const int64_t n_rows : {1, 47, 97, 200, 513}) {
      for (const int64_t n_out : {48, 150}) {
        CAPTURE(info(dtype).name);
        CAPTURE(n_rows);
        CAPTURE(n_out);
        constexpr int64_t kIn = 256;
        const std::vector<std::byte> bytes =
            random_weights(random, dtype, n_out * kIn, real_scales);
        const std::vector<float> x = random.reals(n_rows * kIn);
        const auto product = [&](int n_threads, bool in_place) {
          const auto backend = test_backend(n_threads);
          std::vector<Buffer> owner;
          const Tensor rows = tensor_of(bytes, dtype, n_out, kIn);
          const Tensor weight =
              in_place ? backend->upload(rows, nullptr) : backend->upload(rows, owner);
          DeviceMatrix y(*backend, n_rows, n_out);
          const DeviceMatrix in(*backend, x, n_rows, kIn);
          backend->matmul(y, in, {weight, {}});
          return y.read();
        };
        const std::vector<float> expected = product(1, true);
        for (const int n_threads : {2, 3, 16}) {
          CHECK(same_bits(product(n_threads, true), expected));
          CHECK(same_bits(product(n_threads, false), expected));
        }
      }
    }
  }
}

// A device may reuse a conversion of x, but not after x has been written.
TEST_CASE("operations of one pass give the same results as in separate passes") {
  const auto backend = test_backend();
  for (const DType dtype : {DType::f32, DType::f16, DType::q8_0, DType::q4_k}) {
    for (const int64_t n_rows : {1, 3, 40}) {
      CAPTURE(info(dtype).name);
      CAPTURE(n_rows);
      Random random(3);
      constexpr int64_t kWidth = 256;
      constexpr int64_t kInner = 512;
      std::vector<Buffer> owner;
      std::vector<std::vector<std::byte>> host;  // read in place by the CPU
      const auto weights = [&](DType type, int64_t n_out, int64_t n_in) {
        host.push_back(random_weights(random, type, n_out * n_in, real_scales));
        return Affine{backend->upload(tensor_of(host.back(), type, n_out, n_in), owner), {}};
      };
      const Affine gate = weights(dtype, kInner, kWidth), up = weights(DType::q5_0, kInner, kWidth);
      const Affine down = weights(dtype, kWidth, kInner), square = weights(dtype, kWidth, kWidth);
      // Small, so that nothing overflows f16.
      const DeviceMatrix norm(*backend, random.reals(kWidth, -0.05f, 0.05f), 1, kWidth);
      const std::vector<float> start = random.reals(n_rows * kWidth);

      const auto compute = [&](bool one_pass) {
        DeviceMatrix x(*backend, start, n_rows, kWidth);
        const DeviceMatrix h(*backend, n_rows, kWidth), y(*backend, n_rows, kWidth);
        const DeviceMatrix a(*backend, n_rows, kInner), b(*backend, n_rows, kInner);
        Backend& device = *backend;
        std::vector<std::function<void()>> operations;
        for (int layer = 0; layer < 2; ++layer) {
          operations.insert(
              operations.end(),
              {[&] { device.rms_norm(h, x, norm, 1e-5f); }, [&] { device.matmul(a, h, gate); },
               [&] { device.matmul(b, h, up); }, [&] { device.apply_gate(Gate::swiglu, b, a); },
               [&] { device.matmul_add(x, b, down); }, [&] { device.rms_norm(x, x, norm, 1e-5f); },
               [&] { device.matmul(y, x, square); }, [&] { device.relu(x); },
               [&] { device.matmul(h, x, square); }, [&] { device.rms_norm(h, h, norm, 1e-5f); },
               [&] { device.matmul_add(x, h, square); }, [&] { device.gelu_tanh(h); },
               [&] { device.matmul_add(x, h, square); },
               [&] { device.rms_norm(y, y, norm, 1e-5f); },
               [&] { device.matmul_add(x, y, square); }, [&] { device.gelu_erf(y); },
               [&] { device.matmul_add(x, y, square); }});
        }
        const auto run = [&](auto begin, auto end) {
          run_rows(device, n_rows, [&](const Batch&) {
            for (auto operation = begin; operation != end; ++operation) (*operation)();
          });
        };
        if (one_pass) {
          run(operations.begin(), operations.end());
        } else {
          for (auto it = operations.begin(); it != operations.end(); ++it) run(it, it + 1);
        }
        return x.read();
      };
      const std::vector<float> expected = compute(false);
      CHECK(std::ranges::all_of(expected, [](float value) { return std::isfinite(value); }));
      CHECK(same_bits(compute(true), expected));
    }
  }
}

}  // namespace
}  // namespace h2o
