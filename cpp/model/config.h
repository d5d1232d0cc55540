// Config: what a model is, read from a GGUF file's metadata and validated once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/gguf_shards.h"
#include "model/family.h"

namespace h2o {

// How the angles of rotary position embedding follow from the position. {a}.rope.*
struct RopeConfig {
  int32_t n_rot = 0;        // dimension_count: rotated dimensions of a head, default head_dim
  float freq_base = 10000;  // freq_base
  float freq_scale = 1;     // 1 / scaling.factor
  float magnitude = 1;      // scales cosine and sine: attn_factor, and YaRN's own factor
  bool yarn = false;        // scaling.type is yarn (arXiv 2309.00071), otherwise linear or none
  int32_t n_ctx_orig =
      0;  // scaling.original_context_length: up to it LongRoPE's short factors count
  float yarn_ext_factor = 1;
  float yarn_beta_fast = 32;
  float yarn_beta_slow = 1;
  bool yarn_whole = true;  // the ramp runs between whole dimensions
};

// In some layers a token attends to itself and to the size - 1 tokens before it, and to no others.
struct SlidingWindow {
  int32_t size = 0;          // {a}.attention.sliding_window; 0: in no layer
  int32_t period = 0;        // the last layer of each period has none; 0: every layer has it
  std::vector<bool> layers;  // or one flag for each; {a}.attention.sliding_window_pattern says both
};

// The feed-forward block is a mixture: each row goes to the experts that a router chooses.
struct MixtureConfig {
  int32_t n_experts = 0;    // {a}.expert_count; 0: there is none
  int32_t n_used = 0;       // {a}.expert_used_count
  int32_t n_ff = 0;         // {a}.expert_feed_forward_length, default feed_forward_length
  int32_t n_ff_shared = 0;  // {a}.expert_shared_feed_forward_length; 0: no expert is shared
  bool normalized = true;   // {a}.expert_weights_norm
  float scale = 1;          // {a}.expert_weights_scale
};

struct Config {
  const Family* family = nullptr;  // by general.architecture, the "{a}" of the keys below
  int32_t n_ctx_train = 0;         // {a}.context_length: the longest text it was trained on
  int32_t n_embd = 0;              // {a}.embedding_length
  int32_t n_layers = 0;            // {a}.block_count
  int32_t n_ff = 0;                // {a}.feed_forward_length
  int32_t n_heads = 0;             // {a}.attention.head_count
  int32_t n_kv_heads = 0;          // {a}.attention.head_count_kv, default n_heads
  int32_t head_dim = 0;            // {a}.attention.key_length, default n_embd / n_heads
  int32_t n_vocab = 0;             // rows of token_embd.weight
  float norm_eps = 0;              // {a}.attention.layer_norm_epsilon or layer_norm_rms_epsilon
  float attn_scale = 0;            // {a}.attention.scale, default 1 / sqrt(head_dim)
  bool parallel_residual = false;  // {a}.use_parallel_residual
  bool gelu_erf = false;           // h2o.activation is gelu_erf: the exact form
  RopeConfig rope;
  SlidingWindow sliding_window;
  MixtureConfig mixture;
  RopeConfig window_rope;     // of layers with a window, where the family has another for them
  float embedding_scale = 1;  // {a}.embedding_scale; Gemma's is sqrt(n_embd)
  float residual_scale = 1;   // {a}.residual_scale: of what a block adds to the residual
  float logit_scale = 1;      // {a}.logit_scale, or 1 over it
  float alibi_max_bias = 0;   // {a}.attention.max_alibi_bias, where the family has ALiBi
  float attn_softcap = 0;     // {a}.attn_logit_softcapping; 0: none
  float logit_softcap = 0;    // {a}.final_logit_softcapping; 0: none

  // Does a layer rotate q and k, and if so by window_rope?
  bool rotates(int32_t layer) const;
  bool rotates_by_window(int32_t layer) const { return window_rope.n_rot > 0 && window(layer) > 0; }

  // Of a layer; 0: it has none.
  int32_t window(int32_t layer) const;
};

// Throws FormatError naming the file and the key; for an unknown architecture it lists the known.
Config read_config(const GgufShards& model);

}  // namespace h2o
