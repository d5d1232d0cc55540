// Small random models whose layers alternate between a recurrent state and attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "model_writer.h"

namespace h2o {

// Gated DeltaNet and gated attention, or short convolutions.
inline constexpr const char* kHybrids[] = {"qwen35", "qwen3next", "lfm2"};
// State-space models, which need the CPU; attention in every other layer, or in all, or layers
// alone: one of them is a feed-forward block.
inline constexpr const char* kStateSpaces[] = {"granitehybrid", "falcon-h1", "nemotron_h"};

// Products have about the magnitude of their inputs.
class HybridFile {
 public:
  HybridFile(const std::string& architecture, uint64_t seed)
      : state_space_(std::ranges::count(kStateSpaces, architecture) > 0),
        delta_net_(architecture != "lfm2" && !state_space_),
        both_(architecture == "falcon-h1"),
        alone_(architecture == "nemotron_h"),
        adjacent_(architecture == "qwen3next"),
        writer_(architecture, seed) {
    add_keys();
    add_matrix("token_embd", kWords, kWidth);
    for (uint32_t l = 0; l < kLayers; ++l) {
      const std::string blk = concat("blk.", l, ".");
      add_norm(blk + "attn_norm", kWidth);
      if (attends(l)) add_attention(blk);
      if (!attends(l) || both_) add_recurrent(blk, l);
      if (alone_) continue;
      add_norm(blk + (delta_net_ ? "post_attention_norm" : "ffn_norm"), kWidth);
      add_matrix(blk + "ffn_gate", kFf, kWidth);
      add_mlp(blk);
    }
    add_norm(delta_net_ || state_space_ ? "output_norm" : "token_embd_norm", kWidth);
    add_matrix("output", kWords, kWidth);
    file_.emplace(writer_.file());
  }

  const std::filesystem::path& path() const { return file_->path; }

  // Has the layer a cache?
  bool attends(uint32_t layer) const { return both_ || (layer + 1) % kInterval == 0; }

 private:
  static constexpr uint32_t kWords = 32, kWidth = 64, kFf = 96, kLayers = 5, kInterval = 2;
  static constexpr uint32_t kHeads = 4, kKvHeads = 2, kHeadDim = 32;
  static constexpr uint32_t kTaps = 4, kState = 16, kKHeads = 2, kVHeads = 4;
  static constexpr uint32_t kVWidth = kVHeads * kState;
  static constexpr uint32_t kChannels = 2 * kKHeads * kState + kVWidth;

  void add_keys() {
    writer_.key("context_length", uint32_t{40});
    writer_.key("embedding_length", kWidth);
    writer_.key("block_count", kLayers);
    if (alone_) {
      writer_.key("feed_forward_length", std::vector<uint32_t>{0, 0, kFf, 0, 0});
    } else {
      writer_.key("feed_forward_length", kFf);
    }
    writer_.key("attention.head_count", kHeads);
    writer_.key("attention.key_length", kHeadDim);
    writer_.key("attention.value_length", kHeadDim);
    writer_.key("attention.layer_norm_rms_epsilon", 1e-6f);
    writer_.key("rope.dimension_count", kHeadDim / 4);
    if (delta_net_ || both_) {
      writer_.key("attention.head_count_kv", kKvHeads);
    } else {
      std::vector<uint32_t> kv_heads;
      for (uint32_t l = 0; l < kLayers; ++l) kv_heads.push_back(attends(l) ? kKvHeads : 0);
      writer_.key("attention.head_count_kv", kv_heads);
    }
    if (!delta_net_ && !state_space_) return writer_.key("shortconv.l_cache", kTaps);
    writer_.key("ssm.conv_kernel", kTaps);
    writer_.key("ssm.state_size", kState);
    writer_.key("ssm.group_count", kKHeads);
    writer_.key("ssm.time_step_rank", kVHeads);
    writer_.key("ssm.inner_size", kVWidth);
    if (delta_net_) writer_.key("full_attention_interval", kInterval);
  }

  void add_attention(const std::string& blk) {
    add_matrix(blk + "attn_q", (delta_net_ ? 2 : 1) * kHeads * kHeadDim, kWidth);
    add_matrix(blk + "attn_k", kKvHeads * kHeadDim, kWidth);
    add_matrix(blk + "attn_v", kKvHeads * kHeadDim, kWidth);
    if (!state_space_) {
      add_norm(blk + "attn_q_norm", kHeadDim);
      add_norm(blk + "attn_k_norm", kHeadDim);
    }
    add_matrix(blk + "attn_output", kWidth, kHeads * kHeadDim);
  }

  void add_mlp(const std::string& blk) {
    add_matrix(blk + "ffn_up", kFf, kWidth);
    add_matrix(blk + "ffn_down", kWidth, kFf);
  }

  void add_recurrent(const std::string& blk, uint32_t layer) {
    if (alone_ && layer == 2) return add_mlp(blk);
    if (state_space_) return add_state_space(blk);
    delta_net_ ? add_delta_net(blk) : add_short_conv(blk);
  }

  void add_state_space(const std::string& blk) {
    add_matrix(blk + "ssm_in", kVWidth + kChannels + kVHeads, kWidth);
    add(blk + "ssm_conv1d.weight", {kTaps, kChannels}, -1, 1);
    add(blk + "ssm_conv1d.bias", {kChannels}, -1, 1);
    add(blk + "ssm_a", {1, kVHeads}, -1, -0.1f);
    add(blk + "ssm_d", {1, kVHeads}, -1, 1);
    add(blk + "ssm_dt.bias", {kVHeads}, -1, 1);
    add(blk + "ssm_norm.weight", {kVWidth / kKHeads, kKHeads}, 0.5f, 1.5f);
    add_matrix(blk + "ssm_out", kWidth, kVWidth);
  }

  void add_delta_net(const std::string& blk) {
    add_matrix(blk + "attn_qkv", kChannels, kWidth);
    add_matrix(blk + "attn_gate", kVWidth, kWidth);
    if (adjacent_) {
      add_matrix(blk + "ssm_ba", 2 * kVHeads, kWidth);
    } else {
      add_matrix(blk + "ssm_alpha", kVHeads, kWidth);
      add_matrix(blk + "ssm_beta", kVHeads, kWidth);
    }
    add(blk + "ssm_conv1d.weight", {kTaps, kChannels}, -1, 1);
    add(blk + "ssm_a", {kVHeads}, -1, -0.1f);
    add(blk + "ssm_dt.bias", {kVHeads}, -1, 1);
    add_norm(blk + "ssm_norm", kState);
    add_matrix(blk + "ssm_out", kWidth, kVWidth);
  }

  void add_short_conv(const std::string& blk) {
    add_matrix(blk + "shortconv.in_proj", 3 * kWidth, kWidth);
    add(blk + "shortconv.conv.weight", {kTaps, kWidth}, -1, 1);
    add_matrix(blk + "shortconv.out_proj", kWidth, kWidth);
  }

  void add_norm(const std::string& name, uint32_t n) { add(name + ".weight", {n}, 0.5f, 1.5f); }

  void add_matrix(const std::string& name, uint32_t rows, uint32_t cols) {
    const float most = std::sqrt(3.0f / static_cast<float>(cols));
    add(name + ".weight", {cols, rows}, -most, most);
  }

  void add(const std::string& name, const std::vector<uint64_t>& dims, float least, float most) {
    int64_t n = 1;
    for (const uint64_t dim : dims) n *= static_cast<int64_t>(dim);
    const std::vector<float> values = writer_.random.reals(n, least, most);
    const auto bytes = std::as_bytes(std::span(values));
    writer_.add(name, DType::f32, dims, {bytes.begin(), bytes.end()});
  }

  const bool state_space_;
  const bool delta_net_;
  const bool both_;   // attention and a state in all layers
  const bool alone_;  // layers are one block
  const bool adjacent_;
  ModelWriter writer_;
  std::optional<TempFile> file_;
};

}  // namespace h2o
