// What differs between model families: one table row for each.
#pragma once

#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace h2o {

enum class NormKind { layer, rms };
enum class Activation { relu, gelu, gated };

// What {a}.logit_scale does to the logits.
enum class LogitScale { unknown, multiplies, divides };

// Which projections must have a bias. Others may: a bias in the file is used.
enum class Biases { optional, qkv, all };

// What of q and k is normalised, before rotation: each head by itself, or all heads together.
enum class QkNorm { none, heads, whole };

// The defaults are what most families do.
struct Family {
  std::string_view architecture;  // general.architecture, and the prefix of the metadata keys
  NormKind norm = NormKind::rms;
  RopeLayout rope = RopeLayout::halves;  // none: learned positions
  Activation activation = Activation::gated;
  Gate gate = Gate::swiglu;  // if it is gated
  Biases biases = Biases::optional;
  QkNorm qk_norm = QkNorm::none;
  bool parallel_residual = false;  // unless {a}.use_parallel_residual says otherwise
  int32_t window_period = 0;     // see SlidingWindow; {a}.attention.sliding_window_pattern is first
  int32_t window_base = 0;       // layers with a window rotate by this base, unless
                                 // {a}.rope.freq_base_swa says otherwise; 0: as the others
  int32_t unrotated_period = 0;  // the last layer of each period knows no positions
  bool norm_bias = true;         // of NormKind::layer
  bool shared_norm = false;      // in parallel both branches read what attn_norm gives
  bool post_norms = false;       // what a block adds to the residual is normalised too
  bool embedding_by_width = false;  // embeddings are scaled by sqrt(n_embd)
  int32_t scale_by_width = 0;       // of models with so many layers attention.scale is 1 over the
                                    // root of n_embd / n_heads, unless the file says it
  bool multipliers = false;         // {a}.embedding_scale and residual_scale are read
  LogitScale logit_scale = LogitScale::unknown;
  bool softcaps = false;        // {a}.attn_logit_softcapping and final_logit_softcapping are read
  bool embedding_norm = false;  // what the table of tokens gives is normalised
  float alibi_max_bias = 0;     // by which slopes of ALiBi are made, see alibi_slopes(); 0: none
  bool attn_sinks = false;      // heads have sinks, see Attention
  bool yarn_whole = true;       // YaRN's ramp runs between whole dimensions
  std::string_view ffn_norm = "ffn_norm";  // its name in the file
  bool experts = false;                    // the feed-forward block may be a mixture of experts
  bool experts_normalized = true;  // whose weights sum to 1, unless {a}.expert_weights_norm says no
};

// Throws FormatError, listing the families there are, for another architecture.
const Family& find_family(std::string_view architecture);

// Those that find_family knows.
std::vector<std::string_view> architectures();

}  // namespace h2o
