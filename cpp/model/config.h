// Config: a model's hyperparameters, read from GGUF metadata and validated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/gguf_shards.h"
#include "model/family.h"

namespace h2o {

// How the angles of rotary position embedding are computed. Keys {a}.rope.*
struct RopeConfig {
  RopeLayout layout = RopeLayout::none;  // the family's, see Family::mrope_halves
  int32_t n_rot = 0;        // dimension_count: rotated dimensions of a head, default head_dim
  float freq_base = 10000;  // freq_base
  float freq_scale = 1;     // 1 / scaling.factor
  float magnitude = 1;      // scales cosine and sine: attn_factor, and YaRN's own factor
  bool yarn = false;        // scaling.type is yarn (arXiv 2309.00071), otherwise linear or none
  // scaling.original_context_length: LongRoPE's short factors apply up to this length
  int32_t n_ctx_orig = 0;
  float yarn_ext_factor = 1;
  float yarn_beta_fast = 32;
  float yarn_beta_slow = 1;
  bool yarn_whole = true;  // the ramp is rounded to whole dimensions
  float logit_scale = 1;   // of attention, by {a}.rope.scaling.yarn_log_multiplier: latent only
};

// Layers in which a token attends only to itself and the size - 1 tokens before it, and in
// encoders, whose key has twice as many, as many after it.
struct SlidingWindow {
  int32_t size = 0;    // {a}.attention.sliding_window; 0: no window
  int32_t period = 0;  // the last layer of each period has no window; 0: all layers have one;
                       // the first with Family::window_first_free
  // alternatively one flag per layer; both from {a}.attention.sliding_window_pattern
  std::vector<bool> layers;
};

// A mixture of experts as the feed-forward block: a router selects the experts of each row.
struct MixtureConfig {
  int32_t n_experts = 0;  // {a}.expert_count; 0: no mixture
  int32_t n_used = 0;     // {a}.expert_used_count
  int32_t n_ff = 0;       // {a}.expert_feed_forward_length, default feed_forward_length
  // {a}.expert_shared_feed_forward_length, default n_ff * {a}.expert_shared_count; 0: no shared
  // expert
  int32_t n_ff_shared = 0;
  int32_t n_dense = 0;   // {a}.leading_dense_block_count: the first layers have no mixture
  int32_t period = 1;    // {a}.interleave_moe_layer_step: the last layer of each period has one
  bool sigmoid = false;  // {a}.expert_gating_func; otherwise a softmax
  int32_t n_groups = 1;  // {a}.expert_group_count
  int32_t n_groups_used = 1;  // {a}.expert_group_used_count
  bool normalized = true;     // {a}.expert_weights_norm
  float scale = 1;            // {a}.expert_weights_scale
};

// Multi-head latent attention (arXiv 2405.04434). Keys and values of all heads are computed from
// one latent vector per token, and a part of the keys that is rotated. These are what is cached, as
// one KV head that all queries share: key [n_rot + rank], rotated part first; the value is the
// same.
struct LatentConfig {
  int32_t rank = 0;      // {a}.attention.kv_lora_rank, of the latent vector; 0: no such attention
  int32_t q_rank = 0;    // {a}.attention.q_lora_rank, of queries; 0: they have one matrix
  int32_t head_dim = 0;  // {a}.attention.key_length_mla, of a query, rotated part last
  int32_t v_dim = 0;     // {a}.attention.value_length_mla, of a head's output
};

// Layers of Gated DeltaNet (arXiv 2412.06464) instead of attention: see DeltaNet of a back end.
struct DeltaNetConfig {
  int32_t n_taps = 0;     // {a}.ssm.conv_kernel; 0: no such layers
  int32_t head_dim = 0;   // {a}.ssm.state_size
  int32_t n_k_heads = 0;  // {a}.ssm.group_count
  int32_t n_v_heads = 0;  // {a}.ssm.time_step_rank

  int64_t k_width() const { return int64_t{n_k_heads} * head_dim; }
  int64_t v_width() const { return int64_t{n_v_heads} * head_dim; }
  int64_t n_channels() const { return 2 * k_width() + v_width(); }
  int64_t state_floats() const { return v_width() * head_dim + (n_taps - 1) * n_channels(); }
};

// Layers of a state-space model (Mamba-2): see StateSpace of a back end.
struct StateSpaceConfig {
  int32_t n_taps = 0;    // {a}.ssm.conv_kernel; 0: no such layers
  int32_t n_heads = 0;   // {a}.ssm.time_step_rank
  int32_t head_dim = 0;  // {a}.ssm.inner_size / n_heads
  int32_t n_groups = 0;  // {a}.ssm.group_count
  int32_t d_state = 0;   // {a}.ssm.state_size

  int64_t width() const { return int64_t{n_heads} * head_dim; }
  int64_t n_channels() const { return width() + int64_t{2} * n_groups * d_state; }
  int64_t state_floats() const { return width() * d_state + (n_taps - 1) * n_channels(); }
};

// Sizes of a layer that may differ between layers.
struct LayerSizes {
  int32_t n_kv_heads;
  int32_t head_dim;
  int32_t n_ff;
};

struct Config {
  const Family* family = nullptr;  // from general.architecture, "{a}" in the keys below
  int32_t n_ctx_train = 0;         // {a}.context_length: the trained context
  int32_t n_embd = 0;              // {a}.embedding_length
  int32_t n_layers = 0;            // {a}.block_count without n_unused_layers
  int32_t n_unused_layers = 0;     // {a}.nextn_predict_layers: the last ones, for speculation
  bool predicts = false;           // is it one of them? See predictor.h
  int32_t n_ff = 0;                // {a}.feed_forward_length, see Family::ff_is_both
  int32_t n_heads = 0;             // {a}.attention.head_count
  int32_t n_kv_heads = 0;          // {a}.attention.head_count_kv, default n_heads
  int32_t head_dim = 0;  // of a cached key: {a}.attention.key_length, default n_embd / n_heads
  // [n_layers] if layers differ, see Family::mixed_sizes; the last three are then the largest.
  std::vector<LayerSizes> layer_sizes;
  // [n_layers] the layer whose keys and values a layer reads: its own, or of the last
  // {a}.attention.shared_kv_layers the last one before these with the same window. Empty: its own.
  std::vector<int32_t> kv_sources;
  int32_t n_layer_embd = 0;  // {a}.embedding_length_per_layer_input: numbers of a token for a layer
  int32_t n_vocab = 0;       // rows of token_embd.weight
  // Rows of dense_2.weight and dense_3.weight, which an encoder's embeddings pass; 0: none.
  int32_t n_dense_2 = 0;
  int32_t n_dense_3 = 0;
  int32_t n_token_types = 0;       // rows of token_types.weight, of an encoder; 0: none
  int32_t n_labels = 0;            // rows of cls.output.weight, which scores a text; 0: none
  float norm_eps = 0;              // {a}.attention.layer_norm_epsilon or layer_norm_rms_epsilon
  float attn_scale = 0;            // {a}.attention.scale, default 1 / sqrt(head_dim)
  bool parallel_residual = false;  // {a}.use_parallel_residual
  bool gelu_erf = false;           // h2o.activation is gelu_erf: the exact form
  Gate gate = Gate::swiglu;        // the family's, or of an encoder {a}.hidden_activation
  std::vector<Xielu> xielu;        // xielu.*, of each layer; Activation::xielu only
  float qkv_clamp = 0;             // {a}.attention.clamp_kqv: limit of q, k and v; 0: none
  RopeConfig rope;
  SlidingWindow sliding_window;
  MixtureConfig mixture;
  LatentConfig latent;
  // Which layers have a recurrent state: those of Gated DeltaNet, in
  // {a}.attention.recurrent_layers, or all but the last of each {a}.full_attention_interval; or
  // those without KV heads, which are short convolutions or of a state-space model; see also
  // Family::state_beside_attention and single_blocks. Empty: none.
  std::vector<bool> recurrent_layers;
  std::vector<bool> attention_layers;  // which layers attend, and have a cache; empty: all
  std::vector<bool> ff_layers;         // which layers have a feed-forward block; empty: all
  DeltaNetConfig delta_net;
  StateSpaceConfig state_space;
  int32_t short_conv_taps = 0;  // {a}.shortconv.l_cache; 0: no such layers
  RopeConfig window_rope;       // of layers with a window, if the family has other positions there
  float embedding_scale = 1;    // {a}.embedding_scale; Gemma's is sqrt(n_embd)
  float residual_scale = 1;     // {a}.residual_scale: factor of each block's output
  float logit_scale = 1;        // {a}.logit_scale, or its reciprocal
  float alibi_max_bias = 0;     // {a}.attention.max_alibi_bias, for families with ALiBi
  float attn_softcap = 0;       // {a}.attn_logit_softcapping; 0: none
  float logit_softcap = 0;      // {a}.final_logit_softcapping; 0: none
  // {a}.attention.temperature_*: see Backend::scale_by_position(); scale 0: none
  float temperature_scale = 0;
  int32_t temperature_length = 0;  // default rope.n_ctx_orig, or of block windows their size
  bool unit_norms = false;         // Q and K are normalized after their rotation, without weights

  LayerSizes sizes(int32_t layer) const {
    return layer_sizes.empty() ? LayerSizes{n_kv_heads, head_dim, n_ff} : layer_sizes[layer];
  }

  int32_t kv_source(int32_t layer) const { return kv_sources.empty() ? layer : kv_sources[layer]; }
  // Is the layer the last that reads those keys and values?
  bool reads_last(int32_t layer) const;

  // Does the layer rotate q and k, and if so by window_rope?
  bool rotates(int32_t layer) const;
  bool rotates_by_window(int32_t layer) const { return window_rope.n_rot > 0 && window(layer) > 0; }

  // Is the layer's feed-forward block a mixture of experts?
  bool has_experts(int32_t layer) const {
    return mixture.n_experts > 0 && layer >= mixture.n_dense && (layer + 1) % mixture.period == 0 &&
           has_ff(layer);
  }

  bool normalizes_rotated() const { return unit_norms || family->qk_norm == QkNorm::rotated_heads; }

  // Are the layer's queries scaled by temperature_*?
  bool scales_queries(int32_t layer) const {
    return temperature_scale > 0 && !(family->block_windows && rotates(layer));
  }

  // Can positions be ranks among the kept tokens? Only if all layers use them in the same way, and
  // only for the rotation of q and k.
  bool can_roll() const;

  bool recurrent(int32_t layer) const {
    return !recurrent_layers.empty() && recurrent_layers[layer];
  }
  bool attends(int32_t layer) const { return attention_layers.empty() || attention_layers[layer]; }
  bool has_ff(int32_t layer) const { return ff_layers.empty() || ff_layers[layer]; }
  // Does the layer have attention, or a layer with a state?
  bool mixes(int32_t layer) const { return attends(layer) || recurrent(layer); }

  // KvShape::state_floats
  std::vector<int64_t> state_floats() const;

  // The window of a layer; 0: none.
  int32_t window(int32_t layer) const;
};

// Throws FormatError naming the file and key; for an unknown architecture it lists the known ones.
Config read_config(const GgufShards& model);

}  // namespace h2o
