// Differences between model families: one table row for each.
#pragma once

#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace h2o {

enum class NormKind { layer, rms };
enum class Activation { relu, relu_squared, gelu, xielu, gated };

// How {a}.logit_scale applies to the logits.
enum class LogitScale { unknown, multiplies, divides };

// Which projections must have a bias. Others may have one.
enum class Biases { optional, qkv, all };

// Whether q and k are normalized: per head (always, or if the file has such norms), or over all
// heads, before their rotation; or per head after it.
enum class QkNorm { none, heads, heads_if_present, whole, rotated_heads };

// Defaults are the most common values.
struct Family {
  std::string_view architecture;  // general.architecture, and the prefix of the metadata keys
  NormKind norm = NormKind::rms;
  RopeLayout rope = RopeLayout::halves;
  bool learned_positions = false;  // position_embd; without these and a rope: none, or ALiBi
  int32_t alibi_layers = 0;   // models with this many layers have ALiBi instead of rotary positions
  int32_t rope_base = 10000;  // the default of {a}.rope.freq_base
  float norm_eps = 0;         // the default of its key, which Ollama's files lack; 0: none
  bool may_see = false;       // an encoder of images may be in the file, and is not used
  bool mrope_halves =
      false;  // the layout is halves if {a}.rope.dimension_sections has M-RoPE's axes
  Activation activation = Activation::gated;
  Gate gate = Gate::swiglu;  // if it has a gate
  Biases biases = Biases::optional;
  QkNorm qk_norm = QkNorm::none;
  bool parallel_residual = false;  // overridden by {a}.use_parallel_residual
  bool parallel_without_norm =
      false;  // parallel if layers have no ffn_norm, whatever that key says
  // see SlidingWindow; {a}.attention.sliding_window_pattern takes precedence
  int32_t window_period = 0;
  bool window_first_free = false;  // the first layer of each period has no window, not the last
  int32_t window_size = 0;         // the default of {a}.attention.sliding_window
  // A window is a block: see Attention. Layers with one have positions, and may normalize Q and K
  // after their rotation; the queries of others are scaled by position.
  bool block_windows = false;
  // Layers with a window have unscaled positions, with {a}.rope.freq_base_swa, by default
  // window_base; 0: the base of the others.
  bool window_unscaled = false;
  int32_t window_base = 0;
  int32_t unrotated_period = 0;  // the last layer of each period has no positions (NoPE)
  bool window_rotated = false;   // if some layers have a window, the others have no positions
  bool norm_bias = true;         // of NormKind::layer
  bool norm_weights = true;      // norms have weights
  bool clamps = false;           // {a}.attention.clamp_kqv is read
  bool ff_is_both = false;       // {a}.feed_forward_length is the width of gate and up together
  bool shared_norm = false;      // parallel branches share attn_norm's output
  bool pre_norms = true;         // a block's input is normalized
  bool post_norms = false;  // a block's output is normalized before it is added to the residual
  bool embedding_by_width = false;  // embeddings are scaled by sqrt(n_embd)
  // models with this many layers have attention.scale 1 / sqrt(n_embd / n_heads) by default
  int32_t scale_by_width = 0;
  bool has_multipliers = false;  // {a}.embedding_scale and residual_scale are read
  bool optional_rope = false;    // {a}.rope.scaling.finetuned is false in models without positions
  // Defaults of these: embedding_scale, residual_scale * sqrt(n_layers), n_embd / logit_scale;
  // 0: 1, 1, and none.
  float embedding_scale = 0;
  float depth_scale = 0;
  int32_t base_width = 0;
  LogitScale logit_scale = LogitScale::unknown;
  bool softcaps = false;   // {a}.attn_logit_softcapping and final_logit_softcapping are read
  float attn_softcap = 0;  // their defaults
  float logit_softcap = 0;
  bool embedding_norm = false;  // token embeddings are normalized
  float alibi_max_bias = 0;     // for ALiBi, see alibi_slopes(); 0: none
  // Heads and feed-forward blocks may differ between layers: {a}.attention.key_length_swa is the
  // size of heads in layers with a window, and head_count_kv and feed_forward_length may be arrays.
  // Logits of attention are not scaled by default.
  bool mixed_sizes = false;
  bool layer_inputs = false;   // {a}.embedding_length_per_layer_input and shared_kv_layers are read
  bool v_norm = false;         // values are normalized, without weights
  bool k_is_v = false;         // without attn_v, keys before their norm and rotation are the values
  bool output_scales = false;  // a layer's output may be scaled
  bool attn_sinks = false;     // heads have attention sinks, see Attention
  bool attn_gate = false;      // attn_q has, behind each head's query, the gate of its output
  bool latent = false;         // attention is multi-head latent attention, see LatentConfig
  bool delta_net = false;      // some layers are Gated DeltaNet, see DeltaNetConfig
  bool delta_adjacent = false;  // DeltaNet::adjacent, and alpha and beta are one tensor
  bool short_conv = false;      // some layers are gated short convolutions, see ShortConv
  bool state_space = false;     // some layers are of a state-space model, see StateSpaceConfig
  bool state_beside_attention = false;  // that is, all, which attend to the same input too
  // A layer is attention, of a state-space model or a feed-forward block, with one norm: see
  // {a}.attention.head_count_kv and feed_forward_length of each.
  bool single_blocks = false;
  bool yarn_whole = true;  // YaRN's ramp is rounded to whole dimensions
  bool encoder = false;    // tokens attend to later ones too; there is no cache and no output
  bool sum_norms = false;  // the residual is normalized after each block was added to it
  std::string_view ffn_norm = "ffn_norm";        // its name in the file
  std::string_view output_norm = "output_norm";  // the same
  bool predicts = false;  // nextn_predict_layers are full layers of the family, see predictor.h
  bool experts = false;   // the feed-forward block may be a mixture of experts
  bool experts_normalized = true;   // whose weights sum to 1, overridden by {a}.expert_weights_norm
  bool experts_beside_mlp = false;  // a layer has an MLP too, whose output is added
  bool experts_sigmoid = false;     // the default of {a}.expert_gating_func; otherwise softmax
  float mixer_spread = 0;           // Routes::spread
  bool shares_expert = false;       // a shared expert has the size of the others by default
  bool scales_inputs = false;       // Routes::scales_inputs
};

// Throws FormatError, listing the supported families, for an unknown architecture.
const Family& find_family(std::string_view architecture);

// The architectures that find_family() accepts.
std::vector<std::string_view> architectures();

}  // namespace h2o
