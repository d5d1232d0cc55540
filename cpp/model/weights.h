// Weights: the tensors of a model by name, validated against the Config.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "io/gguf_shards.h"
#include "model/config.h"
#include "model/residency.h"

namespace h2o {

// A mixture of experts; one tensor stacks the matrices of all experts.
struct Mixture {
  Affine router;          // ffn_gate_inp [n_experts, n_embd]
  Tensor selection_bias;  // exp_probs_b.bias [n_experts], of Backend::route(); empty: none
  Affine gate;            // ffn_gate_exps [n_experts * n_ff, n_embd], its bias [n_experts, n_ff]
  Affine up;              // ffn_up_exps, the same
  Affine gate_up;         // ffn_gate_up_exps instead of both: of each expert gate, then up
  Affine down;            // ffn_down_exps [n_experts * n_embd, n_ff], its bias [n_experts, n_embd]
  Tensor expert_scales;   // ffn_down_exps.scale [n_experts]: Routes::expert_scales; empty: none
  // Beside an MLP; norms [n_embd]
  Affine router_norm;    // ffn_gate_inp.scale / sqrt(n_embd), of the router's input
  Affine pre_norm;       // pre_ffw_norm_2, of the experts' input
  Affine post_norm;      // post_ffw_norm_2, of their output
  Affine mlp_post_norm;  // post_ffw_norm_1, of the MLP's output
  Affine shared_router;  // ffn_gate_inp_shexp [1, n_embd]: the gate of the shared expert
  Affine shared_gate;    // ffn_gate_shexp [n_ff_shared, n_embd]
  Affine shared_up;      // ffn_up_shexp, the same
  Affine shared_down;    // ffn_down_shexp [n_embd, n_ff_shared]
};

// A layer of multi-head latent attention; sizes of LatentConfig, n = n_heads.
struct LatentLayer {
  Affine q_a;      // attn_q_a [q_rank, n_embd]; without q_rank, Layer::attn_q has the queries
  Tensor q_norm;   // attn_q_a_norm [q_rank]
  Affine q_b;      // attn_q_b [n * head_dim, q_rank]
  Affine kv_a;     // attn_kv_a_mqa [rank + n_rot, n_embd]
  Tensor kv_norm;  // attn_kv_a_norm [rank]
  Affine k_b;      // attn_k_b [n * rank, head_dim - n_rot]: of each head, transposed
  Affine v_b;      // attn_v_b [n * v_dim, rank]
  // attn_kv_b [n * (head_dim - n_rot + v_dim), rank], of each head both, instead of the last two,
  // which are computed from it
  Tensor kv_b;
};

// A layer of Gated DeltaNet instead of attention; c: n_channels(), v: v_width().
struct DeltaNetLayer {
  Affine qkv;    // attn_qkv [c, n_embd]
  Affine gate;   // attn_gate [v, n_embd], of the output
  Affine alpha;  // ssm_alpha [n_v_heads, n_embd]
  Affine beta;   // ssm_beta [n_v_heads, n_embd]
  // ssm_ba [2 * n_v_heads, n_embd] instead of these: of each K head beta, then alpha
  Affine beta_alpha;
  Tensor conv;     // [n_taps, c] ssm_conv1d, transposed
  Tensor a;        // ssm_a [n_v_heads], without ".weight"
  Tensor dt_bias;  // ssm_dt.bias [n_v_heads]
  Tensor norm;     // ssm_norm [head_dim], of each head's output
  Affine output;   // ssm_out [n_embd, v]
};

// A layer of gated short convolutions instead of attention.
struct ShortConvLayer {
  Affine input;   // shortconv.in_proj [3 * n_embd, n_embd], of b, c and x: see ShortConv
  Tensor conv;    // [n_taps, n_embd] shortconv.conv, transposed
  Affine output;  // shortconv.out_proj [n_embd, n_embd]
};

// A layer of a state-space model (Mamba-2); sizes of StateSpaceConfig, c: n_channels().
struct StateSpaceLayer {
  // ssm_in [2 * width() + 2 * n_groups * d_state + n_heads, n_embd], of these in order
  Affine gate;       // [width(), n_embd]
  Affine xbc;        // [c, n_embd]
  Affine dt;         // [n_heads, n_embd]
  Tensor conv;       // [n_taps, c] ssm_conv1d, transposed
  Tensor conv_bias;  // ssm_conv1d.bias [c]; or empty
  Tensor a;          // ssm_a [n_heads, 1], without ".weight"
  Tensor d;          // ssm_d, the same
  Tensor dt_bias;    // ssm_dt.bias [n_heads]
  Tensor norm;       // ssm_norm [n_groups, width() / n_groups]; or empty
  Affine output;     // ssm_out [n_embd, width()]
};

// Shapes are [rows, cols] = [out, in]; GGUF names are "blk.N." and the member's name. Empty: the
// family does not have it.
struct Layer {
  Affine attn_norm;  // [n_embd]
  // [n_heads * head_dim, n_embd], with a gate 2 * n_heads: of each head q, then the gate. q, k, v
  // may be fused as attn_qkv
  Affine attn_q;
  Affine attn_k;       // [n_kv_heads * head_dim, n_embd]; empty: another layer's are read
  Affine attn_v;       // [n_kv_heads * head_dim, n_embd]; empty: see Family::k_is_v
  Tensor attn_q_norm;  // [head_dim]
  Tensor attn_k_norm;  // [head_dim]
  Tensor attn_sinks;   // [n_heads], see Attention
  Affine attn_output;  // [n_embd, n_heads * head_dim], or * LatentConfig::v_dim
  // post_attention_norm, or attn_output_norm of a sum [n_embd]
  Affine attn_post_norm;
  // or as the family calls it [n_embd]; empty where both branches read attn_norm's
  Affine ffn_norm;
  Affine ffn_post_norm;         // post_ffw_norm, or layer_output_norm of a sum [n_embd]
  Affine ffn_gate;              // [n_ff, n_embd]; may be fused in front of ffn_up
  Affine ffn_up;                // [n_ff, n_embd]
  Affine ffn_down;              // [n_embd, n_ff]
  Affine input_gate;            // inp_gate [n_layer_embd, n_embd]: see layer_embeddings.h
  Affine input_proj;            // proj [n_embd, n_layer_embd]
  Affine input_post_norm;       // post_norm [n_embd]
  float output_scale = 1;       // layer_output_scale: factor of the residual stream
  Mixture mixture;              // instead of the three of an MLP, or beside them
  LatentLayer latent;           // instead of attn_k and attn_v
  DeltaNetLayer delta;          // instead of attn_*
  ShortConvLayer short_conv;    // the same
  StateSpaceLayer state_space;  // the same, or beside attn_*
};

// A layer that predicts from another model's hidden states reads this instead of embeddings: the
// projection of both norms side by side.
struct Fusion {
  Affine embd_norm;    // nextn.enorm [n_embd], of the token's embedding
  Affine hidden_norm;  // nextn.hnorm [n_embd], of the hidden state
  Affine projection;   // nextn.eh_proj [n_embd, 2 * n_embd]
};

struct Weights {
  Tensor token_embd;     // [n_vocab, n_embd]
  Tensor position_embd;  // [n_ctx_train, n_embd] f32; empty with rotary positions
  // token_types [n_types, n_embd] f32 of an encoder; empty: none. Once loaded, position_embd has
  // the sums [min(n_types, 2) * n_ctx_train, n_embd]: for each type, all positions.
  Tensor token_types;
  // Embeddings for each layer, if Config::n_layer_embd; n = n_layers * n_layer_embd
  Tensor layer_embd;       // per_layer_token_embd [n_vocab, n]
  Affine layer_proj;       // per_layer_model_proj [n, n_embd]
  Tensor layer_proj_norm;  // per_layer_proj_norm [n_layer_embd]
  Fusion fusion;           // if Config::predicts
  Affine token_norm;       // token_embd_norm [n_embd], if embeddings are normalized
  Rope rope;               // RopeLayout::none without rotary positions
  Rope long_rope;          // for contexts beyond the original one (LongRoPE), if different
  Tensor alibi_slopes;     // [n_heads] f32, for ALiBi; see Attention
  Rope window_rope;        // of layers with a window, if different
  Tensor ones;             // [head_dim] for norms without weights
  Tensor zeros;            // [n_embd] for sums
  std::vector<Layer> layers;
  Affine output_norm;  // or as the family calls it [n_embd]
  Affine output;       // [n_vocab, n_embd]; tied to token_embd if the file has none
  Affine labels;       // cls.output [n_labels, n_embd]; empty unless the model scores texts
  Affine dense_2;      // [n_dense_2, n_embd] of embeddings; empty: none
  Affine dense_3;      // [n_dense_3, n_dense_2]
  Affine classifier;   // cls [n_embd, n_embd] before it, of an encoder; empty: none

  // Rope of layers without a window.
  const Rope& rope_for(const Config& config, int32_t n_ctx) const {
    return long_rope.frequencies && n_ctx > config.rope.n_ctx_orig ? long_rope : rope;
  }

  std::vector<Buffer> owned;                   // copies; other tensors are views of the mapped file
  std::unique_ptr<WeightResidency> residency;  // with a limit for weights in memory
};

// Receives the number of bytes loaded so far, and of all bytes.
using LoadProgress = std::function<void(size_t loaded, size_t total)>;

// The tensors are valid as long as `model` and `backend`. Throws FormatError naming the tensor, its
// shape or type and the expected one; also for unused tensors. max_resident: the limit for weights
// in the back end's memory, in bytes; 0 = none.
Weights load_weights(const GgufShards& model, const Config& config, Backend& backend,
                     size_t max_resident, const LoadProgress& progress);

// The weights of a layer that predicts from the hidden states of a model (see predictor.h), whose
// weights the others are; they are valid as long as that model. Throws as load_weights() does.
Weights load_predictor(const GgufShards& model, const Config& config, const Weights& others,
                       Backend& backend);

}  // namespace h2o
