// How many launches an operation or a step takes on the emulated device.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "attention_rig.h"
#include "control.h"
#include "random_weights.h"
#include "session_rig.h"
#include "skipping.h"

namespace h2o {
namespace {

using namespace cuda::emulation;

// To be lowered when kernels are fused. Quantized models have one more: SwiGLU, which rounds its
// output; see below.
TEST_CASE("launches of a decode step" * doctest::skip(!on_cuda())) {
  constexpr int kPerLayer = 9;  // 2 norms, 4 of products, the third with SwiGLU, 3 of attention
  constexpr int kOthers = 4;    // embeddings, and the last norm, rows and product
  const auto model = load(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", 1);
  Session session(model, {});
  Random random(4);
  feed(session, 0, random_tokens(random, *model, 3));
  for (int step = 0; step < 2; ++step) {  // without capture, and captured
    take_launches();
    feed(session, 0, random_tokens(random, *model, 1));
    CHECK(take_launches().size() == kPerLayer * model->config.n_layers + kOthers);
  }
}

// Weights are read once for up to 64 rows, and activations are rounded once.
TEST_CASE("launches of products of many rows" * doctest::skip(!on_cuda())) {
  const auto backend = test_backend();
  Random random(6);
  constexpr int64_t kIn = 256, kOut = 40;
  for (const DType dtype : {DType::f16, DType::bf16, DType::q4_k}) {
    std::vector<Buffer> owner;
    const Affine w = uploaded_weights(*backend, owner, random, dtype, kOut, kIn);
    for (const int64_t n_rows : {9, 64, 65, 2048}) {
      CAPTURE(info(dtype).name);
      CAPTURE(n_rows);
      const Skipping skipping;
      const DeviceMatrix x(*backend, n_rows, kIn);
      const DeviceMatrix first(*backend, n_rows, kOut), second(*backend, n_rows, kOut);
      take_launches();
      run_rows(*backend, n_rows, [&](const Batch&) {
        backend->matmul(first, x, w);
        backend->matmul(second, x, w);
      });
      CHECK(take_launches().size() == 3);
    }
  }
}

// The host does not know the routing: the launches are the same in every case.
TEST_CASE("launches of a mixture of experts" * doctest::skip(!on_cuda())) {
  constexpr int32_t kExperts = 5, kUsed = 2;
  constexpr int64_t kWidth = 256, kInner = 64;
  Random random(8);
  for (const DType dtype : {DType::f16, DType::mxfp4}) {
    const auto backend = test_backend();
    Backend& b = *backend;
    std::vector<Buffer> owner;
    const auto weights = [&](DType type, int64_t n_out, int64_t n_in) {
      return uploaded_weights(b, owner, random, type, n_out, n_in);
    };
    const Affine router = weights(DType::f32, kExperts, kWidth);
    const Affine up = weights(dtype, kExperts * kInner, kWidth);
    const Affine gate = weights(dtype, kExperts * kInner, kWidth);
    const Affine down = weights(dtype, kExperts * kWidth, kInner);
    const DeviceMatrix norm(b, random.reals(kWidth, -0.05f, 0.05f), 1, kWidth);
    const bool rounds = dtype == DType::mxfp4;
    const std::pair<int64_t, size_t> launches_of[] = {
        // Norm, router, routes, dispatch, products, gate, product, sum. Rounding to 8 bits is fused
        // for up to 8 copies; otherwise it has its own launch.
        {1, 8},
        {4, 8},
        {8, rounds ? 10 : 8},
        // The router, in f32, takes 8 rows per launch; routes take 2; up and gate one product each.
        {40, 14}};
    for (const auto& [n_rows, expected] : launches_of) {
      CAPTURE(info(dtype).name);
      CAPTURE(n_rows);
      const int64_t n_copies = n_rows * kUsed;
      const std::vector<float> start = random.reals(n_rows * kWidth);
      DeviceMatrix x(b, n_rows, kWidth);
      const DeviceMatrix h(b, n_rows, kWidth), logits(b, n_rows, kExperts);
      const DeviceMatrix copies(b, n_copies, kWidth);
      const DeviceMatrix ups(b, n_copies, kInner), gates(b, n_copies, kInner);
      const Buffer arrays = b.allocate(4 * (2 * n_copies + kExperts + 1));
      const Routes routes{.n_experts = kExperts,
                          .n_used = kUsed,
                          .normalized = true,
                          .scale = 1,
                          .weights = arrays.as<float>(),
                          .copy_rows = arrays.as<int32_t>() + n_copies,
                          .offsets = arrays.as<int32_t>() + 2 * n_copies};
      const std::function<void()> operations[] = {
          [&] { b.rms_norm(h, x, norm, 1e-5f); },
          [&] { b.matmul(logits, h, router); },
          [&] { b.route(routes, logits, {}); },
          [&] { b.dispatch(copies, h, routes); },
          [&] { b.matmul_experts({{ups, up}, {gates, gate}}, copies, routes); },
          [&] { b.apply_gate(Gate::swiglu_clamped, ups, gates); },
          [&] { b.matmul_experts({{copies, down}}, ups, routes); },
          [&] { b.combine_add(x, copies, routes); }};
      x.write(start);
      take_launches();
      run_rows(b, n_rows, [&](const Batch&) {
        for (const auto& operation : operations) operation();
      });
      CHECK(take_launches().size() == expected);
      const std::vector<float> together = x.read();
      CHECK(std::ranges::all_of(together, [](float value) { return std::isfinite(value); }));
      x.write(start);
      for (const auto& operation : operations) {
        run_rows(b, n_rows, [&](const Batch&) { operation(); });
      }
      CHECK(same_bits(x.read(), together));
    }
  }
}

Attention plain_attention(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                          const KvShape& shape) {
  return {.out = out,
          .q = q,
          .k = k,
          .v = v,
          .rope = {},
          .scale = attention_scale(shape),
          .sinks = {},
          .slopes = {}};
}

// Three tokens of two sequences through one layer; and the launches of each step.
std::pair<std::vector<float>, std::vector<size_t>> quantized_layer(bool one_pass,
                                                                   DType v_type = DType::q8_0) {
  constexpr int64_t kRows = 2, kWidth = 128, kKvWidth = 64, kInner = 160;
  const KvShape shape{.n_layers = 1,
                      .n_sequences = kRows,
                      .n_heads = 4,
                      .n_kv_heads = 2,
                      .head_dim = 32,
                      .max_tokens = 8,
                      .max_rows = kRows};
  const auto backend = test_backend();
  Backend& b = *backend;
  const KvPolicy policy;
  KvCache cache(b, {&policy, 1}, shape);
  Random random(5);
  std::vector<Buffer> owner;
  const auto weights = [&](int64_t n_out, int64_t n_in, DType dtype = DType::q8_0) {
    return uploaded_weights(b, owner, random, dtype, n_out, n_in);
  };
  const Affine wq = weights(kWidth, kWidth), wk = weights(kKvWidth, kWidth);
  const Affine wv = weights(kKvWidth, kWidth, v_type), wo = weights(kWidth, kWidth);
  const Affine w_up = weights(kInner, kWidth), w_gate = weights(kInner, kWidth);
  const Affine w_down = weights(kWidth, kInner);
  const DeviceMatrix norm(b, random.reals(kWidth, -0.05f, 0.05f), 1, kWidth);
  const DeviceMatrix x(b, random.reals(kRows * kWidth), kRows, kWidth);
  const DeviceMatrix h(b, kRows, kWidth), q(b, kRows, kWidth), out(b, kRows, kWidth);
  const DeviceMatrix k(b, kRows, kKvWidth), v(b, kRows, kKvWidth);
  const DeviceMatrix up(b, kRows, kInner), gate(b, kRows, kInner);
  const Attention attention = plain_attention(out, q, k, v, shape);
  std::vector<size_t> launches;
  for (int32_t position = 0; position < 3; ++position) {
    Batch batch;
    for (int32_t s = 0; s < kRows; ++s) batch.add(s, position, std::vector<int32_t>(1), false);
    const std::function<void()> operations[] = {
        [&] { b.rms_norm(h, x, norm, 1e-5f); },
        [&] { b.matmul({{q, wq}, {k, wk}, {v, wv}}, h); },
        [&] { b.attend(attention, cache.layer(0), batch); },
        [&] { b.matmul_add(x, out, wo); },
        [&] { b.rms_norm(h, x, norm, 1e-5f); },
        [&] { b.matmul_gated(Gate::swiglu, {up, w_up}, {gate, w_gate}, h); },
        [&] { b.matmul_add(x, up, w_down); }};
    take_launches();
    if (one_pass) {
      b.run(batch, [&] {
        for (const auto& operation : operations) operation();
      });
    } else {
      for (const auto& operation : operations) b.run(batch, operation);
    }
    launches.push_back(take_launches().size());
    cache.advance(batch);
  }
  return {x.read(), launches};
}

TEST_CASE("a layer of quantized weights fuses the rounding of activations" *
          doctest::skip(!on_cuda())) {
  const auto [fused, launches] = quantized_layer(true);
  const auto [alone, more] = quantized_layer(false);
  CHECK(launches == std::vector<size_t>(3, 10));
  CHECK(more == std::vector<size_t>(3, 14));
  CHECK(std::ranges::all_of(fused, [](float value) { return std::isfinite(value); }));
  CHECK(same_bits(fused, alone));
  // V of another type, as in half of the layers of Q4_K_M, takes a launch of its own.
  CHECK(quantized_layer(true, DType::q4_0).second == std::vector<size_t>(3, 11));
}

// Takes rows shorter and longer than what a block has in registers, operands in 8 bits and halves.
TEST_CASE("norms round their output as a launch of its own does" * doctest::skip(!on_cuda())) {
  constexpr int64_t kOut = 3;
  Random random(10);
  struct {
    int64_t n_rows, n;
    DType dtype;
  } const cases[] = {{2, 32, DType::q8_0},   {2, 1056, DType::q8_0}, {2, 8192, DType::q8_0},
                     {2, 9248, DType::q8_0}, {9, 32, DType::q8_0},   {9, 9248, DType::q8_0},
                     {9, 1056, DType::bf16}, {9, 1056, DType::f16}};
  for (const auto& one : cases) {
    const int64_t n_rows = one.n_rows, n = one.n;
    const DType dtype = one.dtype;
    CAPTURE(n_rows);
    CAPTURE(n);
    CAPTURE(info(dtype).name);
    const auto backend = test_backend();
    Backend& b = *backend;
    std::vector<Buffer> owner;
    const Affine w = uploaded_weights(b, owner, random, dtype, kOut, n);
    const DeviceMatrix weight(b, random.reals(n), 1, n), bias(b, random.reals(n), 1, n);
    const DeviceMatrix x(b, random.reals(n_rows * n), n_rows, n);
    const DeviceMatrix h(b, n_rows, n), y(b, n_rows, kOut);
    const std::function<void()> norms[] = {[&] { b.rms_norm(h, x, weight, 1e-5f); },
                                           [&] { b.layer_norm(h, x, {weight, bias}, 1e-5f); }};
    for (const auto& norm : norms) {
      const auto multiply = [&] { b.matmul({{y, w}}, h); };
      take_launches();
      run_rows(b, n_rows, [&](const Batch&) {
        norm();
        multiply();
      });
      CHECK(take_launches().size() == 2);
      const std::vector<float> fused = y.read();
      run_rows(b, n_rows, [&](const Batch&) { norm(); });
      run_rows(b, n_rows, [&](const Batch&) { multiply(); });
      CHECK(take_launches().size() == 3);
      CHECK(std::ranges::all_of(fused, [](float value) { return std::isfinite(value); }));
      CHECK(same_bits(y.read(), fused));
    }
  }
}

// Prompts whose keys are one part, or two.
TEST_CASE("attention rounds its output as a launch of its own does" * doctest::skip(!on_cuda())) {
  constexpr int32_t kWidth = 64, kOut = 3;
  for (const int32_t n_rows : {20, 150}) {
    CAPTURE(n_rows);
    const KvShape shape{
        .n_heads = 1, .n_kv_heads = 1, .head_dim = kWidth, .max_tokens = 160, .max_rows = n_rows};
    const auto backend = test_backend();
    Backend& b = *backend;
    const KvPolicy policy;
    KvCache cache(b, {&policy, 1}, shape);
    Random random(11);
    std::vector<Buffer> owner;
    const Affine w = uploaded_weights(b, owner, random, DType::q8_0, kOut, kWidth);
    const auto rows = [&] {
      return DeviceMatrix(b, random.reals(n_rows * kWidth), n_rows, kWidth);
    };
    const DeviceMatrix q = rows(), k = rows(), v = rows(), out = rows();
    const DeviceMatrix y(b, n_rows, kOut);
    const Attention attention = plain_attention(out, q, k, v, shape);
    Batch batch;
    batch.add(0, 0, std::vector<int32_t>(n_rows), false);
    take_launches();
    b.run(batch, [&] {
      b.attend(attention, cache.layer(0), batch);
      b.matmul({{y, w}}, out);
    });
    CHECK(take_launches().size() == (n_rows == 20 ? 5 : 6));  // the sixth merges two parts
    const std::vector<float> fused = y.read();
    b.run(batch, [&] { b.matmul({{y, w}}, out); });
    CHECK(take_launches().size() == 2);
    CHECK(std::ranges::all_of(fused, [](float value) { return std::isfinite(value); }));
    CHECK(same_bits(y.read(), fused));
  }
}

}  // namespace
}  // namespace h2o
