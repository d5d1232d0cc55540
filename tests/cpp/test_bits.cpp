// Results that are bit-identical on every processor, compiler and operating system: hashes recorded
// on x86-64. Products with quantized weights are identical on every instruction set; whole passes
// on the scalar one, except GELU with the error function, which comes from the C library.
#include <doctest/doctest.h>

#include "cpu/cpu_backend.h"
#include "cpu/isa/detect.h"
#include "model/session.h"
#include "testing.h"

namespace h2o {
namespace {

// Distributions differ between standard libraries; engines do not.
float real(std::mt19937_64& engine) {
  return static_cast<float>(static_cast<int64_t>(engine() >> 40)) * 0x1p-23f - 1;
}

class Hash {  // FNV-1a
 public:
  void add(std::span<const float> values) {
    for (const float value : values) {
      const auto bits = std::bit_cast<uint32_t>(value);
      for (int i = 0; i < 32; i += 8) hash_ = (hash_ ^ (bits >> i & 255)) * 0x100000001b3;
    }
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

struct Product {
  DType dtype;
  std::vector<size_t> scales;  // offsets of the f16 numbers of a block
  uint64_t hash;
};

const Product kProducts[] = {
    {DType::q4_0, {0}, 0x9cde74dca861d1f2},    {DType::q4_1, {0, 2}, 0xe5c81f8233790aa5},
    {DType::q5_0, {0}, 0xa6faeaa5ffe376a3},    {DType::q5_1, {0, 2}, 0xde3790ac0aaf4d00},
    {DType::q8_0, {0}, 0x71a0342f87fd9aa7},    {DType::q2_k, {80, 82}, 0xd22d74388cd39a78},
    {DType::q3_k, {108}, 0x2ebbdb03406586de},  {DType::q4_k, {0, 2}, 0x082cbb997f79b743},
    {DType::q5_k, {0, 2}, 0x9db0c5c5884bd8fc}, {DType::q6_k, {208}, 0x5fa06aac66a9095d},
    {DType::iq4_nl, {0}, 0xb0c2ba2eedf776c5},  {DType::iq4_xs, {0}, 0xcd58a18ad7b9e84c},
};

// 48 columns of random blocks and 5 rows of 1024 elements.
uint64_t product_hash(const CpuKernels& table, const Product& product) {
  constexpr int64_t kIn = 1024, kOut = 48, kRows = 5;
  std::mt19937_64 engine(1);
  std::vector<std::byte> w(byte_size(product.dtype, kOut * kIn));
  for (std::byte& byte : w) byte = static_cast<std::byte>(engine() >> 56);
  for (size_t i = 0; i < w.size(); i += info(product.dtype).block_bytes) {
    for (const size_t at : product.scales) {  // from 2^-8 to 2^-6
      const uint64_t bits = engine();
      w[i + at] = static_cast<std::byte>(bits);
      w[i + at + 1] = static_cast<std::byte>(0x1c + (bits >> 8 & 7));
    }
  }
  std::vector<float> x(kRows * kIn), y(kRows * kOut);
  for (float& value : x) value = real(engine);

  const TypeKernels& type = table.of(product.dtype);
  std::vector<int8_t> q(x.size());
  std::vector<float> scales(x.size() / 32);
  std::vector<int32_t> sums(x.size() / type.int8_group);
  const Int8Rows rounded{q.data(), scales.data(), sums.data(), kRows, kIn, type.int8_group};
  table.quantize_rows(rounded, x.data(), 0, kRows);
  const Buffer workspace = make_cpu_backend(1, "scalar")->allocate(kInt8Workspace);
  type.int8_matmul({.y = y.data(),
                    .x = x.data(),
                    .w = w.data(),
                    .bias = nullptr,
                    .n_rows = kRows,
                    .n_in = kIn,
                    .w_row_bytes = static_cast<int64_t>(byte_size(product.dtype, kIn)),
                    .y_stride = kOut,
                    .add = false},
                   rounded, 0, kOut, workspace.data());
  Hash hash;
  hash.add(y);
  return hash.value();
}

TEST_CASE("products with quantized weights are bit-identical everywhere") {
  for (const CpuKernels* table : supported_kernels()) {
    for (const Product& product : kProducts) {
      CAPTURE(std::string_view(table->isa));
      CAPTURE(info(product.dtype).name);
      CHECK(product_hash(*table, product) == product.hash);
    }
  }
}

// The bits of the logits after a prompt of 20 tokens and 18 greedy tokens.
uint64_t logits_hash(const char* path, const KvPolicy& policy) {
  const auto model = std::make_shared<Model>(path, make_cpu_backend(1, "scalar"));
  Session session(model, {.policies = {policy}, .n_ctx = 40, .n_batch = 32});
  std::mt19937_64 engine(2);
  std::vector<int32_t> tokens(20);
  for (int32_t& token : tokens) token = static_cast<int32_t>(engine() % model->config.n_vocab);
  Hash hash;
  for (int i = 0; i <= 18; ++i) {
    const Input input{0, tokens};
    const std::span<const float> logits = session.step({&input, 1});
    hash.add(logits);
    tokens = {
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin())};
  }
  return hash.value();
}

TEST_CASE("a scalar pass is bit-identical everywhere") {
  struct Pass {
    const char* path;
    KvPolicy policy;
    uint64_t hash;
  };
  const KvPolicy full, h2o{.sinks = 2, .heavy = 8, .recent = 6};
  const Pass passes[] = {
      {H2O_SOURCE_DIR "/models/tiny-opt.gguf", full, 0x4a431a1000715a11},
      {H2O_SOURCE_DIR "/models/tiny-opt.gguf", h2o, 0xdea65a2af5e015ae},
      {H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", full, 0x183d19ba4766d99d},
      {H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", h2o, 0xd818c8531ad11cff},
      {H2O_SOURCE_DIR "/tests/data/golden/qwen3moe.gguf", h2o, 0xf90ab8c7d398422a},
      {H2O_SOURCE_DIR "/tests/data/golden/gptneox.gguf", full, 0x4b1f834de9fbf06b},
  };
  for (const Pass& pass : passes) {
    if (brief() && pass.policy.heavy == 0) continue;
    CAPTURE(std::string_view(pass.path));
    CAPTURE(pass.policy.heavy);
    CHECK(logits_hash(pass.path, pass.policy) == pass.hash);
  }
}

}  // namespace
}  // namespace h2o
