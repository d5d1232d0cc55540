// Weights: the tensors of a model by name, each validated against the Config once.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "io/gguf_shards.h"
#include "model/config.h"
#include "model/expert_offload.h"
#include "model/host_experts.h"
#include "model/layer_offload.h"

namespace h2o {

// A mixture of experts; the matrices of one kind are one tensor, expert by expert.
struct Mixture {
  Affine router;         // ffn_gate_inp [n_experts, n_embd]
  Affine gate;           // ffn_gate_exps [n_experts * n_ff, n_embd], its bias [n_experts, n_ff]
  Affine up;             // ffn_up_exps, the same
  Affine down;           // ffn_down_exps [n_experts * n_embd, n_ff], its bias [n_experts, n_embd]
  Affine shared_router;  // ffn_gate_inp_shexp [1, n_embd]: how much of the shared expert
  Affine shared_gate;    // ffn_gate_shexp [n_ff_shared, n_embd]
  Affine shared_up;      // ffn_up_shexp, the same
  Affine shared_down;    // ffn_down_shexp [n_embd, n_ff_shared]
};

// Shapes are [rows, cols] = [out, in]; GGUF names are "blk.N." and the member's name. What a family
// does not have is empty.
struct Layer {
  Affine attn_norm;       // [n_embd]
  Affine attn_q;          // [n_heads * head_dim, n_embd]; these three may be one tensor, attn_qkv
  Affine attn_k;          // [n_kv_heads * head_dim, n_embd]
  Affine attn_v;          // [n_kv_heads * head_dim, n_embd]
  Tensor attn_q_norm;     // [head_dim]
  Tensor attn_k_norm;     // [head_dim]
  Tensor attn_sinks;      // [n_heads], see Attention
  Affine attn_output;     // [n_embd, n_heads * head_dim]
  Affine attn_post_norm;  // post_attention_norm [n_embd]
  Affine
      ffn_norm;  // or as the family calls it [n_embd]; empty where both branches read attn_norm's
  Affine ffn_post_norm;  // post_ffw_norm [n_embd]
  Affine ffn_gate;       // [n_ff, n_embd]; may be one tensor with ffn_up, which has it first
  Affine ffn_up;         // [n_ff, n_embd]
  Affine ffn_down;       // [n_embd, n_ff]
  Mixture mixture;       // instead of these three
};

struct Weights {
  Tensor token_embd;     // [n_vocab, n_embd]
  Tensor position_embd;  // [n_ctx_train, n_embd] f32; empty with rotary positions
  Affine token_norm;     // token_embd_norm [n_embd], where what the table gives is normalised
  Rope rope;             // its frequencies; no layout with learned positions
  Rope long_rope;        // for contexts beyond the original one, where there are others (LongRoPE)
  Tensor alibi_slopes;   // [n_heads] f32, where attention falls with the distance; see Attention
  Rope window_rope;      // of layers with a window, where they have their own
  std::vector<Layer> layers;
  Affine output_norm;  // [n_embd]
  Affine output;       // [n_vocab, n_embd]; token_embd where the file has none (tied)

  // Of layers without a window.
  const Rope& rope_for(const Config& config, int32_t n_ctx) const {
    return long_rope.frequencies && n_ctx > config.rope.n_ctx_orig ? long_rope : rope;
  }

  std::vector<Buffer> owned;  // what is not read from the mapped file
  // Where not all are in memory, one of these brings in layers or experts, or has them.
  std::unique_ptr<LayerOffload> stream;
  std::unique_ptr<ExpertOffload> experts;
  std::unique_ptr<HostExperts> host_experts;
};

// Told of the bytes that are loaded, of all of them.
using LoadProgress = std::function<void(size_t loaded, size_t total)>;

// The tensors stay valid as long as `model` and `backend`. Throws FormatError naming the tensor,
// its shape or type and the expected one; also for a tensor that the family has no use for.
// max_resident: how many bytes of them may be in the back end's memory at a time; 0 = all.
Weights load_weights(const GgufShards& model, const Config& config, Backend& backend,
                     size_t max_resident, const LoadProgress& progress);

}  // namespace h2o
