#include "model/find_weights.h"

#include <charconv>
#include <string>
#include <string_view>
#include <unordered_set>

#include "core/error.h"
#include "model/file_kind.h"

namespace h2o {
namespace {

// Looks up tensors by name and records which ones were used.
class Finder {
 public:
  Finder(const GgufShards& model, const Config& config) : model_(model), config_(config) {}

  // One matrix, or n matrices of the same shape, in any supported type; empty if missing.
  Tensor matrix_or_none(const std::string& name, int64_t rows, int64_t cols, int64_t n = 1) {
    const Tensor tensor = model_.tensor(name, n);
    rows *= n;
    if (tensor && (tensor.rows != rows || tensor.cols != cols)) {
      fail(name, concat("has shape [", tensor.rows, ", ", tensor.cols, "], expected [", rows, ", ",
                        cols, "]"));
    }
    if (tensor) used_.insert(name);
    return tensor;
  }

  Tensor matrix(const std::string& name, int64_t rows, int64_t cols) {
    return present(name, matrix_or_none(name, rows, cols));
  }

  // A tensor that GGUF stores in f32: norms, biases, learned positions.
  Tensor floats_or_none(const std::string& name, int64_t rows, int64_t cols) {
    const Tensor tensor = matrix_or_none(name, rows, cols);
    if (tensor && tensor.dtype != DType::f32) {
      fail(name, concat("has type ", info(tensor.dtype).name, ", expected F32"));
    }
    return tensor;
  }

  Tensor floats(const std::string& name, int64_t rows, int64_t cols) {
    return present(name, floats_or_none(name, rows, cols));
  }

  // All experts' matrices, stacked vertically; shape [n, rows, cols] in the file.
  Affine experts(const std::string& name, int64_t n, int64_t out, int64_t in, bool needs_bias,
                 bool may_have_factors = true) {
    const Tensor weight = present(name + ".weight", matrix_or_none(name + ".weight", out, in, n));
    const Tensor bias = floats_or_none(name + ".bias", n, out);
    return {weight, needs_bias ? present(name + ".bias", bias) : bias,
            may_have_factors ? factor(name, weight, n) : Tensor{}};
  }

  Affine linear(const std::string& name, int64_t out, int64_t in, bool needs_bias) {
    const Tensor weight = matrix(name + ".weight", out, in);
    const Tensor bias = floats_or_none(name + ".bias", 1, out);
    return {weight, needs_bias ? present(name + ".bias", bias) : bias, factor(name, weight, 1)};
  }

  // The scales of n whole matrices, which files with NVFP4 have.
  Tensor factor(const std::string& name, const Tensor& weight, int64_t n) {
    used_.insert(name + ".input_scale");  // for activations in NVFP4, which are not rounded to it
    const Tensor scale = floats_or_none(name + ".scale", 1, n);
    if (scale && weight.dtype != DType::nvfp4) {
      fail(name + ".scale",
           concat("scales a weight of type ", info(weight.dtype).name, ", expected NVFP4"));
    }
    return scale;
  }

  Affine norm(const std::string& name) {
    if (!config_.family->norm_weights) return {};
    // Falcon-H1's ffn_norm is called so.
    const Tensor weight = floats(has(name) ? name : name + ".weight", 1, config_.n_embd);
    if (!has_bias()) return {weight, {}, {}};
    return {weight, floats(name + ".bias", 1, config_.n_embd), {}};
  }

  // A tensor without effect may be there.
  void ignore(const std::string& name) { used_.insert(name); }

  bool has_bias() const {
    return config_.family->norm == NormKind::layer && config_.family->norm_bias;
  }

  bool has(const std::string& name, int64_t n = 1) const {
    return static_cast<bool>(model_.tensor(name, n));
  }

  // An unused tensor would silently change the result.
  void expect_all_used() const {
    for (const GgufFile& file : model_.files()) {
      for (const GgufTensor& tensor : file.tensors()) {
        // Old converters saved the inverse frequencies, which are derived from the metadata here.
        if (tensor.name.ends_with("attn_rot_embd.weight") || is_unused(tensor.name)) continue;
        if (config_.family->may_see && is_of_encoder(tensor.name)) continue;
        if (!used_.contains(std::string(tensor.name))) {
          fail(quoted(tensor.name),
               concat("is not part of a '", config_.family->architecture, "' model"));
        }
      }
    }
  }

 private:
  bool is_unused(std::string_view name) const {
    constexpr std::string_view prefix = "blk.";
    if (!name.starts_with(prefix)) return false;
    name.remove_prefix(prefix.size());
    int32_t layer = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
    return error == std::errc() && layer >= config_.n_layers &&
           layer < config_.n_layers + config_.n_unused_layers;
  }

  Tensor present(const std::string& name, const Tensor& tensor) const {
    if (!tensor) fail(name, "is missing");
    return tensor;
  }

  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    throw FormatError(concat("[weights] ", model_.path(), ": tensor ", name, " ", what));
  }

  const GgufShards& model_;
  const Config& config_;
  std::unordered_set<std::string> used_;
};

// Rows [begin, end) of a matrix and of its bias.
Affine slice(const Affine& whole, int64_t begin, int64_t end) {
  const auto rows = [&](const Tensor& t) {
    return Tensor{t.row(begin), t.dtype, end - begin, t.cols};
  };
  Tensor bias;
  if (whole.bias) {
    bias = {reinterpret_cast<std::byte*>(whole.bias.floats() + begin), DType::f32, 1, end - begin};
  }
  return {rows(whole.weight), bias, whole.factor};
}

Mixture find_mixture(Finder& find, const Config& c, const std::string& blk) {
  const MixtureConfig& m = c.mixture;
  const bool biases = c.family->biases == Biases::all;
  Mixture mixture;
  const bool beside = c.family->experts_beside_mlp;
  if (beside) {
    mixture.router.weight = find.matrix(blk + "ffn_gate_inp.weight", m.n_experts, c.n_embd);
    mixture.router_norm.weight = find.floats(blk + "ffn_gate_inp.scale", 1, c.n_embd);
    mixture.expert_scales = find.floats_or_none(blk + "ffn_down_exps.scale", 1, m.n_experts);
    mixture.pre_norm = find.norm(blk + "pre_ffw_norm_2");
    mixture.post_norm = find.norm(blk + "post_ffw_norm_2");
    mixture.mlp_post_norm = find.norm(blk + "post_ffw_norm_1");
  } else {
    mixture.router = find.linear(blk + "ffn_gate_inp", m.n_experts, c.n_embd, biases);
  }
  mixture.selection_bias = find.floats_or_none(blk + "exp_probs_b.bias", 1, m.n_experts);
  const bool gated = c.family->activation == Activation::gated;
  if (gated && find.has(blk + "ffn_gate_up_exps.weight", m.n_experts)) {
    mixture.gate_up =
        find.experts(blk + "ffn_gate_up_exps", m.n_experts, int64_t{2} * m.n_ff, c.n_embd, biases);
  } else {
    if (gated) {
      mixture.gate = find.experts(blk + "ffn_gate_exps", m.n_experts, m.n_ff, c.n_embd, biases);
    }
    mixture.up = find.experts(blk + "ffn_up_exps", m.n_experts, m.n_ff, c.n_embd, biases);
  }
  mixture.down =
      find.experts(blk + "ffn_down_exps", m.n_experts, c.n_embd, m.n_ff, biases, !beside);
  if (m.n_ff_shared > 0) {
    mixture.shared_router.weight =
        find.matrix_or_none(blk + "ffn_gate_inp_shexp.weight", 1, c.n_embd);
    if (gated) {
      mixture.shared_gate = find.linear(blk + "ffn_gate_shexp", m.n_ff_shared, c.n_embd, false);
    }
    mixture.shared_up = find.linear(blk + "ffn_up_shexp", m.n_ff_shared, c.n_embd, false);
    mixture.shared_down = find.linear(blk + "ffn_down_shexp", c.n_embd, m.n_ff_shared, false);
  }
  return mixture;
}

DeltaNetLayer find_delta_net(Finder& find, const Config& c, const std::string& blk) {
  const DeltaNetConfig& d = c.delta_net;
  const auto gates = [&](const char* name, int64_t n) {
    return find.linear(blk + name, n * d.n_v_heads, c.n_embd, false);
  };
  const bool both = c.family->delta_adjacent;
  return {.qkv = find.linear(blk + "attn_qkv", d.n_channels(), c.n_embd, false),
          .gate = find.linear(blk + "attn_gate", d.v_width(), c.n_embd, false),
          .alpha = both ? Affine() : gates("ssm_alpha", 1),
          .beta = both ? Affine() : gates("ssm_beta", 1),
          .beta_alpha = both ? gates("ssm_ba", 2) : Affine(),
          .conv = find.floats(blk + "ssm_conv1d.weight", d.n_channels(), d.n_taps),
          .a = find.floats(blk + "ssm_a", 1, d.n_v_heads),
          .dt_bias = find.floats(blk + "ssm_dt.bias", 1, d.n_v_heads),
          .norm = find.floats(blk + "ssm_norm.weight", 1, d.head_dim),
          .output = find.linear(blk + "ssm_out", c.n_embd, d.v_width(), false)};
}

ShortConvLayer find_short_conv(Finder& find, const Config& c, const std::string& blk) {
  return {.input = find.linear(blk + "shortconv.in_proj", int64_t{3} * c.n_embd, c.n_embd, false),
          .conv = find.floats(blk + "shortconv.conv.weight", c.n_embd, c.short_conv_taps),
          .output = find.linear(blk + "shortconv.out_proj", c.n_embd, c.n_embd, false)};
}

StateSpaceLayer find_state_space(Finder& find, const Config& c, const std::string& blk) {
  const StateSpaceConfig& s = c.state_space;
  const int64_t width = s.width(), n_channels = s.n_channels();
  const Affine input = find.linear(blk + "ssm_in", width + n_channels + s.n_heads, c.n_embd, false);
  const std::string norm = blk + "ssm_norm.weight";
  const int64_t group = width / s.n_groups;
  return {.gate = slice(input, 0, width),
          .xbc = slice(input, width, width + n_channels),
          .dt = slice(input, width + n_channels, width + n_channels + s.n_heads),
          .conv = find.floats(blk + "ssm_conv1d.weight", n_channels, s.n_taps),
          .conv_bias = find.floats_or_none(blk + "ssm_conv1d.bias", 1, n_channels),
          .a = find.floats(blk + "ssm_a", s.n_heads, 1),
          .d = find.floats(blk + "ssm_d", s.n_heads, 1),
          .dt_bias = find.floats(blk + "ssm_dt.bias", 1, s.n_heads),
          .norm = c.family->state_beside_attention ? find.floats_or_none(norm, s.n_groups, group)
                                                   : find.floats(norm, s.n_groups, group),
          .output = find.linear(blk + "ssm_out", c.n_embd, width, false)};
}

void find_latent(Finder& find, const Config& c, const std::string& blk, Layer& layer) {
  const LatentConfig& m = c.latent;
  const int64_t q_width = int64_t{c.n_heads} * m.head_dim, n_rot = c.rope.n_rot;
  LatentLayer& latent = layer.latent;
  if (m.q_rank > 0) {
    latent.q_a = find.linear(blk + "attn_q_a", m.q_rank, c.n_embd, false);
    latent.q_norm = find.floats(blk + "attn_q_a_norm.weight", 1, m.q_rank);
    latent.q_b = find.linear(blk + "attn_q_b", q_width, m.q_rank, false);
  } else {
    layer.attn_q = find.linear(blk + "attn_q", q_width, c.n_embd, false);
  }
  latent.kv_a = find.linear(blk + "attn_kv_a_mqa", m.rank + n_rot, c.n_embd, false);
  latent.kv_norm = find.floats(blk + "attn_kv_a_norm.weight", 1, m.rank);
  const int64_t n_plain = m.head_dim - n_rot;
  if (find.has(blk + "attn_kv_b.weight")) {
    latent.kv_b = find.matrix(blk + "attn_kv_b.weight", c.n_heads * (n_plain + m.v_dim), m.rank);
  } else {
    latent.k_b = find.experts(blk + "attn_k_b", c.n_heads, m.rank, n_plain, false);
    latent.v_b = find.experts(blk + "attn_v_b", c.n_heads, m.v_dim, m.rank, false);
  }
  layer.attn_output =
      find.linear(blk + "attn_output", c.n_embd, int64_t{c.n_heads} * m.v_dim, false);
}

void find_attention(Finder& find, const Config& c, const std::string& blk, int32_t index,
                    Layer& layer) {
  const LayerSizes sizes = c.sizes(index);
  const int64_t q_width = int64_t{c.n_heads} * sizes.head_dim;
  const int64_t kv_width = int64_t{sizes.n_kv_heads} * sizes.head_dim;
  const int64_t q_rows = c.family->attn_gate ? 2 * q_width : q_width;
  const bool qkv_biases = c.family->biases != Biases::optional;
  const bool biases = c.family->biases == Biases::all;
  if (c.kv_source(index) != index) {
    layer.attn_q = find.linear(blk + "attn_q", q_width, c.n_embd, qkv_biases);
    layer.attn_q_norm = find.floats(blk + "attn_q_norm.weight", 1, sizes.head_dim);
    layer.attn_output = find.linear(blk + "attn_output", c.n_embd, q_width, biases);
    for (const char* unread : {"attn_k", "attn_v", "attn_k_norm"}) {
      find.ignore(blk + unread + ".weight");
    }
    return;
  }
  if (find.has(blk + "attn_qkv.weight")) {
    const Affine qkv = find.linear(blk + "attn_qkv", q_rows + 2 * kv_width, c.n_embd, qkv_biases);
    layer.attn_q = slice(qkv, 0, q_rows);
    layer.attn_k = slice(qkv, q_rows, q_rows + kv_width);
    layer.attn_v = slice(qkv, q_rows + kv_width, q_rows + 2 * kv_width);
  } else {
    layer.attn_q = find.linear(blk + "attn_q", q_rows, c.n_embd, qkv_biases);
    layer.attn_k = find.linear(blk + "attn_k", kv_width, c.n_embd, qkv_biases);
    if (!c.family->k_is_v || find.has(blk + "attn_v.weight")) {
      layer.attn_v = find.linear(blk + "attn_v", kv_width, c.n_embd, qkv_biases);
    }
  }
  const bool may_lack_norms = c.family->qk_norm == QkNorm::heads_if_present;
  if (may_lack_norms ? find.has(blk + "attn_q_norm.weight") : c.family->qk_norm != QkNorm::none) {
    const bool whole = c.family->qk_norm == QkNorm::whole;
    const int64_t head_dim = sizes.head_dim;
    layer.attn_q_norm = find.floats(blk + "attn_q_norm.weight", 1, whole ? q_width : head_dim);
    layer.attn_k_norm = find.floats(blk + "attn_k_norm.weight", 1, whole ? kv_width : head_dim);
  }
  if (c.family->attn_sinks) {
    layer.attn_sinks = find.floats(blk + "attn_sinks.weight", 1, c.n_heads);
  }
  layer.attn_output = find.linear(blk + "attn_output", c.n_embd, q_width, biases);
}

Layer find_layer(Finder& find, const Config& c, int32_t index) {
  const std::string blk = concat("blk.", index, ".");
  const bool biases = c.family->biases == Biases::all;

  Layer layer;
  // Falcon 40B has two parallel norms; the second is attention's.
  const bool two_norms = c.family->shared_norm && find.has(blk + "attn_norm_2.weight");
  const bool may_lack_norm = c.family->encoder && index == 0 && !find.has(blk + "attn_norm.weight");
  if (c.family->pre_norms && !may_lack_norm) {
    layer.attn_norm = find.norm(blk + (two_norms ? "attn_norm_2" : "attn_norm"));
  }
  if (two_norms) layer.ffn_norm = find.norm(blk + "attn_norm");
  if (c.recurrent(index)) {
    if (c.family->short_conv) layer.short_conv = find_short_conv(find, c, blk);
    if (c.family->delta_net) layer.delta = find_delta_net(find, c, blk);
    if (c.family->state_space) layer.state_space = find_state_space(find, c, blk);
  }
  if (c.attends(index)) {
    c.family->latent ? find_latent(find, c, blk, layer)
                     : find_attention(find, c, blk, index, layer);
  }
  const bool shared_norm =
      (c.parallel_residual && c.family->shared_norm) || c.family->single_blocks;
  if (c.family->pre_norms && !shared_norm && !two_norms) {
    layer.ffn_norm = find.norm(blk + std::string(c.family->ffn_norm));
  }
  if (c.family->post_norms) {
    layer.attn_post_norm = find.norm(blk + "post_attention_norm");
    layer.ffn_post_norm = find.norm(blk + "post_ffw_norm");
  }
  if (c.family->sum_norms) {
    layer.attn_post_norm = find.norm(blk + "attn_output_norm");
    layer.ffn_post_norm = find.norm(blk + "layer_output_norm");
  }
  if (c.n_layer_embd > 0) {
    layer.input_gate = find.linear(blk + "inp_gate", c.n_layer_embd, c.n_embd, false);
    layer.input_proj = find.linear(blk + "proj", c.n_embd, c.n_layer_embd, false);
    layer.input_post_norm = find.norm(blk + "post_norm");
  }
  if (c.family->output_scales) {
    const Tensor scale = find.floats_or_none(blk + "layer_output_scale.weight", 1, 1);
    if (scale) layer.output_scale = scale.floats()[0];
  }
  if (!c.has_ff(index)) return layer;
  if (c.has_experts(index)) {
    layer.mixture = find_mixture(find, c, blk);
    if (!c.family->experts_beside_mlp) return layer;
  }
  const bool gated = c.family->activation == Activation::gated;
  const int64_t n_ff = c.sizes(index).n_ff;
  if (gated && !find.has(blk + "ffn_gate.weight")) {
    const Affine both = find.linear(blk + "ffn_up", 2 * n_ff, c.n_embd, biases);
    layer.ffn_gate = slice(both, 0, n_ff);
    layer.ffn_up = slice(both, n_ff, 2 * n_ff);
  } else {
    if (gated) layer.ffn_gate = find.linear(blk + "ffn_gate", n_ff, c.n_embd, biases);
    layer.ffn_up = find.linear(blk + "ffn_up", n_ff, c.n_embd, biases);
  }
  layer.ffn_down = find.linear(blk + "ffn_down", c.n_embd, n_ff, biases);
  return layer;
}

}  // namespace

Weights find_weights(const GgufShards& model, const Config& c) {
  Weights w;
  Finder find(model, c);
  w.token_embd = find.matrix("token_embd.weight", c.n_vocab, c.n_embd);
  if (c.family->embedding_norm) w.token_norm = find.norm("token_embd_norm");
  if (c.n_layer_embd > 0) {
    const int64_t n = int64_t{c.n_layers} * c.n_layer_embd;
    w.layer_embd = find.matrix("per_layer_token_embd.weight", c.n_vocab, n);
    w.layer_proj = find.linear("per_layer_model_proj", n, c.n_embd, false);
    w.layer_proj_norm = find.floats("per_layer_proj_norm.weight", 1, c.n_layer_embd);
  }
  if (c.rope.layout != RopeLayout::none) {
    const auto divisors = [&](const char* name) {
      return find.floats_or_none(name, 1, c.rope.n_rot / 2);
    };
    w.rope = {c.rope.layout, divisors("rope_freqs.weight"), c.rope.magnitude};
    if (find.has("rope_factors_long.weight")) {
      w.long_rope = {c.rope.layout, divisors("rope_factors_long.weight"), c.rope.magnitude};
      w.rope.frequencies = find.floats("rope_factors_short.weight", 1, c.rope.n_rot / 2);
    }
  } else if (c.family->learned_positions) {
    w.position_embd = find.floats("position_embd.weight", c.n_ctx_train, c.n_embd);
  }
  if (c.n_token_types > 0) {
    w.token_types = find.floats("token_types.weight", c.n_token_types, c.n_embd);
  }
  for (int32_t l = 0; l < c.n_layers; ++l) {
    w.layers.push_back(find_layer(find, c, l));
  }
  if (!c.family->output_norm.empty()) {
    w.output_norm = find.norm(std::string(c.family->output_norm));
  }
  w.output.weight = find.matrix_or_none("output.weight", c.n_vocab, c.n_embd);
  w.output.bias = find.floats_or_none("output.bias", 1, c.n_vocab);
  if (w.output.weight) w.output.factor = find.factor("output", w.output.weight, 1);
  if (c.n_labels > 0) w.labels = find.linear("cls.output", c.n_labels, c.n_embd, false);
  if (c.n_dense_3 > 0) {
    w.dense_2 = find.linear("dense_2", c.n_dense_2, c.n_embd, false);
    w.dense_3 = find.linear("dense_3", c.n_dense_3, c.n_dense_2, false);
  }
  if (c.family->encoder && find.has("cls.weight")) {
    w.classifier = find.linear("cls", c.n_embd, c.n_embd, false);
  }
  find.expect_all_used();
  return w;
}

Weights find_predictor(const GgufShards& model, const Config& c) {
  Weights w;
  Finder find(model, c);
  const std::string blk = concat("blk.", c.n_layers, "."), nextn = blk + "nextn.";
  w.layers.push_back(find_layer(find, c, c.n_layers));
  w.fusion = {.embd_norm = find.norm(nextn + "enorm"),
              .hidden_norm = find.norm(nextn + "hnorm"),
              .projection = find.linear(nextn + "eh_proj", c.n_embd, int64_t{2} * c.n_embd, false)};
  for (const std::string& norm : {nextn + "shared_head_norm", blk + "layer_output_norm"}) {
    if (find.has(norm + ".weight")) w.output_norm = find.norm(norm);
  }
  w.token_embd = find.matrix_or_none(nextn + "embed_tokens.weight", c.n_vocab, c.n_embd);
  w.output.weight = find.matrix_or_none(nextn + "shared_head_head.weight", c.n_vocab, c.n_embd);
  return w;
}

}  // namespace h2o
