// Small random mixture-of-experts models of every family that has them.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "model_writer.h"

namespace h2o {

struct MixtureShape {
  std::string architecture;
  DType experts;  // type of their weights; all others are F32
  uint32_t n_layers, n_experts, n_used;
};

// Products have about the magnitude of their inputs.
class MixtureFile {
 public:
  MixtureFile(const MixtureShape& shape, uint64_t seed)
      : shape_(shape), family_(shape.architecture), writer_(family_, seed) {
    add_keys();
    add_matrix("token_embd", kWords, kWidth);
    for (uint32_t l = 0; l < shape.n_layers; ++l) {
      const std::string blk = concat("blk.", l, ".");
      add_attention(blk);
      const bool post = family_ == "gpt-oss" || family_ == "glm4moe";
      add_norm(blk + (post ? "post_attention_norm" : "ffn_norm"), kWidth);
      if (l < n_dense()) {
        add_mlp(blk, "");
      } else {
        add_experts(blk);
      }
    }
    add_norm("output_norm", kWidth);
    add_matrix("output", kWords, kWidth);
    file_.emplace(writer_.file());
  }

  const std::filesystem::path& path() const { return file_->path; }

 private:
  static constexpr uint32_t kWords = 32, kWidth = 64, kFf = 96;
  static constexpr uint32_t kHeads = 4, kKvHeads = 2, kHeadDim = 16;

  // The first layers, without experts.
  uint32_t n_dense() const { return family_ == "glm4moe" && shape_.n_layers > 1 ? 1 : 0; }

  void add_keys() {
    writer_.key("context_length", uint32_t{40});
    writer_.key("embedding_length", kWidth);
    writer_.key("block_count", shape_.n_layers);
    writer_.key("feed_forward_length", kFf);
    writer_.key("attention.head_count", kHeads);
    writer_.key("attention.head_count_kv", kKvHeads);
    writer_.key("attention.layer_norm_rms_epsilon", 1e-5f);
    writer_.key("expert_count", shape_.n_experts);
    writer_.key("expert_used_count", shape_.n_used);
    if (family_ == "qwen2moe") writer_.key("expert_shared_feed_forward_length", kFf);
    if (family_ == "glm4moe") {
      writer_.key("expert_shared_count", uint32_t{1});
      writer_.key("leading_dense_block_count", n_dense());
      writer_.key("expert_weights_scale", 1.5f);
    }
    if (family_ == "granitemoe") {
      writer_.key("embedding_scale", 3.0f);
      writer_.key("residual_scale", 0.4f);
      writer_.key("attention.scale", 0.2f);
      writer_.key("logit_scale", 2.5f);
    }
    if (family_ == "gpt-oss") {
      writer_.key("attention.sliding_window", uint32_t{6});
      writer_.key("rope.scaling.type", "yarn");
      writer_.key("rope.scaling.factor", 4.0f);
      writer_.key("rope.scaling.original_context_length", uint32_t{10});
    }
  }

  void add_attention(const std::string& blk) {
    const bool biases = family_ == "gpt-oss" || family_ == "qwen2moe";
    add_norm(blk + "attn_norm", kWidth);
    add_linear(blk + "attn_q", kHeads * kHeadDim, kWidth, biases);
    add_linear(blk + "attn_k", kKvHeads * kHeadDim, kWidth, biases);
    add_linear(blk + "attn_v", kKvHeads * kHeadDim, kWidth, biases);
    add_linear(blk + "attn_output", kWidth, kHeads * kHeadDim, family_ == "gpt-oss");
    if (family_ == "olmoe") {
      add_norm(blk + "attn_q_norm", kHeads * kHeadDim);
      add_norm(blk + "attn_k_norm", kKvHeads * kHeadDim);
    }
    if (family_ == "qwen3moe") {
      add_norm(blk + "attn_q_norm", kHeadDim);
      add_norm(blk + "attn_k_norm", kHeadDim);
    }
    if (family_ == "gpt-oss") add_floats(blk + "attn_sinks.weight", {kHeads}, -1, 2);
  }

  void add_experts(const std::string& blk) {
    const bool biases = family_ == "gpt-oss";
    add_linear(blk + "ffn_gate_inp", shape_.n_experts, kWidth, biases);
    add_linear(blk + "ffn_gate_exps", kFf, kWidth, biases, shape_.n_experts);
    add_linear(blk + "ffn_up_exps", kFf, kWidth, biases, shape_.n_experts);
    add_linear(blk + "ffn_down_exps", kWidth, kFf, biases, shape_.n_experts);
    if (family_ == "qwen2moe") {
      add_floats(blk + "ffn_gate_inp_shexp.weight", {kWidth}, -0.2f, 0.2f);
      add_mlp(blk, "_shexp");
    }
    if (family_ == "glm4moe") {
      add_floats(blk + "exp_probs_b.bias", {shape_.n_experts}, -0.3f, 0.3f);
      add_mlp(blk, "_shexp");
    }
  }

  void add_mlp(const std::string& blk, const char* suffix) {
    add_matrix(concat(blk, "ffn_gate", suffix), kFf, kWidth);
    add_matrix(concat(blk, "ffn_up", suffix), kFf, kWidth);
    add_matrix(concat(blk, "ffn_down", suffix), kWidth, kFf);
  }

  void add_norm(const std::string& name, uint64_t width) {
    add_floats(name + ".weight", {width}, 0.7f, 1.3f);
  }

  void add_linear(const std::string& name, uint64_t rows, uint64_t cols, bool bias,
                  uint64_t n_experts = 0) {
    add_matrix(name, rows, cols, n_experts);
    if (!bias) return;
    std::vector<uint64_t> dims = {rows};
    if (n_experts > 0) dims.push_back(n_experts);
    add_floats(name + ".bias", dims, -0.5f, 0.5f);
  }

  // Uniform numbers of variance 1 / cols; blocks as close to it as their scales allow.
  void add_matrix(const std::string& name, uint64_t rows, uint64_t cols, uint64_t n_experts = 0) {
    std::vector<uint64_t> dims = {cols, rows};
    if (n_experts > 0) dims.push_back(n_experts);
    const DType dtype = n_experts > 0 ? shape_.experts : DType::f32;
    if (is_quantized(dtype)) {
      const auto n = static_cast<int64_t>(cols * rows * n_experts);
      writer_.add(name + ".weight", dtype, dims,
                  random_weights(writer_.random, dtype, n,
                                 dtype == DType::q8_0 ? small_scales : real_scales));
      return;
    }
    const float most = std::sqrt(3 / static_cast<float>(cols));
    add_floats(name + ".weight", dims, -most, most, dtype);
  }

  // They are from 2^-10 to 2^-8, for integers up to 127.
  static uint16_t small_scales(Random& random) {
    return static_cast<uint16_t>(random.integer(5, 6) << 10 | random.integer(0, 1023));
  }

  void add_floats(const std::string& name, const std::vector<uint64_t>& dims, float least,
                  float most, DType dtype = DType::f32) {
    int64_t n = 1;
    for (const uint64_t dim : dims) n *= static_cast<int64_t>(dim);
    const std::vector<float> values = writer_.random.reals(n, least, most);
    std::vector<std::byte> data(byte_size(dtype, n));
    choose_kernels("scalar").of(dtype).encode(data.data(), values.data(), n);
    writer_.add(name, dtype, dims, data);
  }

  MixtureShape shape_;
  std::string family_;
  ModelWriter writer_;
  std::optional<TempFile> file_;
};

}  // namespace h2o
