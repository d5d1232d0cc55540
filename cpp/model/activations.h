// Activations: the buffers of one forward pass, by name, allocated once.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "model/config.h"

namespace h2o {

// Buffers of a mixture of experts: n_rows * n_used copies of rows, grouped by expert. All f32.
struct MixtureActivations {
  Tensor logits;        // [n_rows, n_experts] of the router
  Tensor x;             // [n_rows * n_used, n_embd] input and output of the experts
  Tensor up;            // [n_rows * n_used, n_ff] n_ff of one expert
  Tensor gate;          // [n_rows * n_used, n_ff]; no rows where the family has no gate
  Tensor shared_up;     // [n_rows, n_ff_shared]
  Tensor shared_gate;   // [n_rows, n_ff_shared]; the same
  Tensor shared_logit;  // [n_rows, 1]
  Tensor mlp;           // [n_rows, n_embd] output of an MLP beside the experts; no rows without
  Tensor sum;           // [n_rows, n_embd] of the experts' outputs, there
  Routes routes;
};

// Buffers of multi-head latent attention; no rows without. All f32; sizes of LatentConfig, h =
// n_heads. Those with h * n_rows rows are grouped by head.
struct LatentActivations {
  Tensor q_a;      // [n_rows, q_rank]; no rows if queries have one matrix
  Tensor q;        // [n_rows, h * head_dim]
  Tensor q_plain;  // [h * n_rows, head_dim - n_rot] the part that is not rotated
  Tensor kv;       // [n_rows, rank + n_rot]
  Tensor latent;   // [n_rows, rank]
  Tensor by_head;  // [h * n_rows, rank] queries for latent vectors, or attention's output
  Tensor v;        // [h * n_rows, v_dim]
  Tensor out;      // [n_rows, h * v_dim]
};

// Buffers of layers of Gated DeltaNet; no rows without. All f32; see backend/DeltaNet.
struct DeltaNetActivations {
  Tensor qkv;         // [n_rows, n_channels()]
  Tensor gate;        // [n_rows, v_width()]
  Tensor alpha;       // [n_rows, n_v_heads]
  Tensor beta;        // [n_rows, n_v_heads]
  Tensor beta_alpha;  // [n_rows, 2 * n_v_heads]; no rows if their weights are two tensors
  Tensor out;         // [n_rows, v_width()]
};

// Buffers of layers of gated short convolutions, the same; see backend/ShortConv.
struct ShortConvActivations {
  Tensor bcx;  // [n_rows, 3 * n_embd]
  Tensor out;  // [n_rows, n_embd]
};

// Buffers of layers of a state-space model, the same; see backend/StateSpace and StateSpaceConfig.
struct StateSpaceActivations {
  Tensor gate;   // [n_rows, width()]
  Tensor xbc;    // [n_rows, n_channels()]
  Tensor dt;     // [n_rows, n_heads]
  Tensor decay;  // [n_rows, n_heads]
  Tensor out;    // [n_rows, width()]
};

// Buffers of embeddings for each layer; no rows without. All f32; see layer_embeddings.h.
struct LayerEmbeddings {
  Tensor embd;       // [n_rows, n_layers * n_layer_embd]
  Tensor projected;  // the same
  Tensor input;      // [n_rows, n_layer_embd] of one layer
  Tensor gate;       // [n_rows, n_layer_embd]
};

// All f32.
struct Activations {
  Tensor x;           // [n_rows, n_embd]  the residual stream
  Tensor h;           // [n_rows, n_embd]  normalized input of a block
  Tensor hidden;      // [n_rows, n_embd] another model's, see Fusion; no rows without
  Tensor fused;       // [n_rows, 2 * n_embd] input of its projection; the same
  Tensor q;           // [n_rows, n_heads * head_dim]
  Tensor k;           // [n_rows, n_kv_heads * head_dim]
  Tensor v;           // [n_rows, n_kv_heads * head_dim]; no rows if the values are the keys
  Tensor attn;        // [n_rows, n_heads * head_dim]
  Tensor q_and_gate;  // [n_rows, 2 * n_heads * head_dim]; no rows where attention has none
  Tensor attn_gate;   // [n_rows, n_heads * head_dim]; the same
  LatentActivations latent;
  DeltaNetActivations delta;
  ShortConvActivations short_conv;
  StateSpaceActivations state_space;
  LayerEmbeddings layers;
  Tensor up;    // [n_rows, n_ff]
  Tensor gate;  // [n_rows, n_ff]; no rows where the family has no gate
  // empty without experts; if all layers have them and no MLP, `up` and `gate` are empty
  MixtureActivations experts;

  Tensor last;     // [n_logits, n_embd]  rows whose logits are computed
  Tensor dense_2;  // [n_logits, n_dense_2]; no rows without
  Tensor dense_3;  // [n_logits, n_dense_3]; the same
  Tensor logits;   // [n_logits, n_vocab]; no rows of an encoder
  Tensor labels;   // [n_logits, n_labels]; no rows without labels
};

// The bytes that allocate_activations() allocates.
int64_t activation_bytes(const Config& config, int32_t n_rows, int32_t n_logits);

// Allocates `storage` and returns views into it, for up to `n_rows` rows and `n_logits` logits.
Activations allocate_activations(Backend& backend, const Config& config, int32_t n_rows,
                                 int32_t n_logits, Buffer& storage);

// Returns views of these buffers for a smaller batch.
Activations first(const Activations& a, int64_t n_rows, int64_t n_logits);

// Returns views of these buffers with the widths of a layer, if layers differ.
Activations in_layer(const Activations& a, const Config& config, int32_t layer);

}  // namespace h2o
