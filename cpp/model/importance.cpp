#include "model/importance.h"

#include "core/error.h"

namespace h2o {

ImportanceMatrix::ImportanceMatrix(std::shared_ptr<Model> model) : model_(std::move(model)) {
  require(model_->backend->capabilities().observed_products, model_->backend->name(),
          " does not support observing products; use device=cpu");
  const int64_t n_experts = model_->config.mixture.n_experts;
  for (int32_t l = 0; l < model_->config.n_layers; ++l) {
    const Layer& layer = model_->weights.layers[l];
    const Mixture& m = layer.mixture;
    const std::string blk = concat("blk.", l, ".");
    // Slices of a fused tensor share their input; the first represents the whole tensor.
    const bool one_qkv = static_cast<bool>(model_->file.tensor(blk + "attn_qkv.weight"));
    follow(blk + (one_qkv ? "attn_qkv" : "attn_q"), layer.attn_q.weight, 1);
    if (!one_qkv) {
      follow(blk + "attn_k", layer.attn_k.weight, 1);
      follow(blk + "attn_v", layer.attn_v.weight, 1);
    }
    follow(blk + "attn_output", layer.attn_output.weight, 1);
    follow(blk + "attn_qkv", layer.delta.qkv.weight, 1);
    follow(blk + "attn_gate", layer.delta.gate.weight, 1);
    follow(blk + "ssm_alpha", layer.delta.alpha.weight, 1);
    follow(blk + "ssm_beta", layer.delta.beta.weight, 1);
    follow(blk + "ssm_ba", layer.delta.beta_alpha.weight, 1);
    follow(blk + "ssm_out", layer.delta.output.weight, 1);
    follow(blk + "ssm_in", layer.state_space.gate.weight, 1);  // the first slice, as above
    follow(blk + "ssm_out", layer.state_space.output.weight, 1);
    follow(blk + "shortconv.in_proj", layer.short_conv.input.weight, 1);
    follow(blk + "shortconv.out_proj", layer.short_conv.output.weight, 1);
    if (model_->file.tensor(blk + "ffn_gate.weight")) {
      follow(blk + "ffn_gate", layer.ffn_gate.weight, 1);
      follow(blk + "ffn_up", layer.ffn_up.weight, 1);
    } else {
      follow(blk + "ffn_up", (layer.ffn_gate.weight ? layer.ffn_gate : layer.ffn_up).weight, 1);
    }
    follow(blk + "ffn_down", layer.ffn_down.weight, 1);
    follow(blk + "ffn_gate_inp", m.router.weight, 1);
    follow(blk + "ffn_gate_exps", m.gate.weight, n_experts);
    follow(blk + "ffn_up_exps", m.up.weight, n_experts);
    // Its first product, with gate, is at the first row of an expert.
    follow(blk + "ffn_gate_up_exps", m.gate_up.weight, n_experts);
    follow(blk + "ffn_down_exps", m.down.weight, n_experts);
    follow(blk + "ffn_gate_inp_shexp", m.shared_router.weight, 1);
    follow(blk + "ffn_gate_shexp", m.shared_gate.weight, 1);
    follow(blk + "ffn_up_shexp", m.shared_up.weight, 1);
    follow(blk + "ffn_down_shexp", m.shared_down.weight, 1);
  }
  const std::lock_guard lock(model_->mutex);
  model_->backend->observe([this](const Tensor& weight, const Tensor& x) { add(weight, x); });
}

void ImportanceMatrix::end() {
  const std::lock_guard lock(model_->mutex);
  model_->backend->observe(nullptr);
}

void ImportanceMatrix::follow(const std::string& name, const Tensor& weight, int64_t n_matrices) {
  if (!weight) return;
  const int64_t bytes = weight.bytes() / n_matrices;
  for (int64_t i = 0; i < n_matrices; ++i) {
    places_.emplace(weight.data + i * bytes, Place{sums_.size(), i});
  }
  sums_.push_back({name + ".weight", weight.cols, std::vector<double>(n_matrices * weight.cols),
                   std::vector<int64_t>(n_matrices)});
}

void ImportanceMatrix::add(const Tensor& weight, const Tensor& x) {
  const auto found = places_.find(weight.data);
  if (found == places_.end()) return;
  const auto [tensor, matrix] = found->second;
  InputSums& sums = sums_[tensor];
  double* const squares = sums.squares.data() + matrix * x.cols;
  for (int64_t row = 0; row < x.rows; ++row) {
    const float* const values = x.floats() + row * x.cols;
    for (int64_t i = 0; i < x.cols; ++i) squares[i] += double{values[i]} * values[i];
  }
  sums.counts[matrix] += x.rows;
}

}  // namespace h2o
