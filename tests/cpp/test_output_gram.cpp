// compute_output_gram(), for any layout in which the back end stores W_O.
#include <doctest/doctest.h>

#include <cmath>

#include "cpu/isa/detect.h"
#include "model/output_gram.h"
#include "session_rig.h"

namespace h2o {
namespace {

constexpr KvPolicy kOutput{
    .heavy = 10, .recent = 6, .scoring = Scoring::mean, .value_norm = ValueNorm::output};

// W_O of a layer [n_embd, n_heads * head_dim], from the file.
std::vector<float> output_weight(const Model& model, int32_t layer) {
  const Tensor w = model.file.tensor(concat("blk.", layer, ".attn_output.weight"));
  std::vector<float> values(w.rows * w.cols);
  const TypeKernels& type = choose_kernels("scalar").of(w.dtype);
  for (int64_t i = 0; i < w.rows; ++i) type.decode(values.data() + i * w.cols, w.row(i), w.cols);
  return values;
}

TEST_CASE("the Gram matrices are sums over the query heads of a kv_head") {
  for (const char* path : {H2O_SOURCE_DIR "/models/tiny-opt.gguf",
                           H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf"}) {
    const std::shared_ptr<Model> model = load(path, 2);
    const Config& c = model->config;
    std::vector<KvPolicy> policies(c.n_layers, kOutput);
    policies[0].value_norm = ValueNorm::l1;
    const Buffer buffer = compute_output_gram(*model, policies);
    const int64_t d = c.head_dim, group = c.n_heads / c.n_kv_heads;
    std::vector<float> grams(c.n_layers * c.n_kv_heads * d * d);
    REQUIRE(buffer.size() == grams.size() * sizeof(float));
    model->backend->read(grams.data(), buffer.data(), buffer.size());

    for (int32_t l = 0; l < c.n_layers; ++l) {
      const std::vector<float> w = output_weight(*model, l);
      const int64_t width = c.n_heads * d;
      for (int64_t kv_head = 0; kv_head < c.n_kv_heads; ++kv_head) {
        for (int64_t i = 0; i < d * d; ++i) {
          double sum = 0, size = 0;  // of the products, and of their magnitudes
          for (int64_t h = kv_head * group; l > 0 && h < (kv_head + 1) * group; ++h) {
            for (int64_t o = 0; o < c.n_embd; ++o) {
              const double product =
                  double{w[o * width + h * d + i / d]} * w[o * width + h * d + i % d];
              sum += product;
              size += std::abs(product);
            }
          }
          // Rows of x are rounded to 8 bits with scales of 32 elements: ones are reproduced up to
          // about 2^-22; on CUDA weights are rounded to f16.
          const double bound = size * (on_cuda() ? 4e-3 : 1e-5);
          CHECK(std::abs(grams[(l * c.n_kv_heads + kv_head) * d * d + i] - sum) <= bound);
        }
      }
    }
  }
}

TEST_CASE("no matrices are computed for policies that do not use them") {
  const std::shared_ptr<Model> model = tiny_model(1);
  CHECK(compute_output_gram(*model, std::vector{KvPolicy{}}).size() == 0);
  const KvPolicy l1{.heavy = 4, .recent = 4, .value_norm = ValueNorm::l1};
  CHECK(compute_output_gram(*model, std::vector{l1}).size() == 0);
}

}  // namespace
}  // namespace h2o
