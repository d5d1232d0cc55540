// Weights: the tensors of a model by name, each validated against the Config once.
#pragma once

#include <vector>

#include "core/backend.h"
#include "io/gguf.h"
#include "model/config.h"

namespace h2o {

// Shapes are [rows, cols] = [out, in]; GGUF names are "blk.N." and the comment.
struct Layer {
  Affine attn_norm;    // attn_norm    [n_embd]
  Affine attn_q;       // attn_q       [n_heads * head_dim, n_embd]
  Affine attn_k;       // attn_k       [n_kv_heads * head_dim, n_embd]
  Affine attn_v;       // attn_v       [n_kv_heads * head_dim, n_embd]
  Affine attn_output;  // attn_output  [n_embd, n_heads * head_dim]
  Affine ffn_norm;     // ffn_norm     [n_embd]
  Affine ffn_up;       // ffn_up       [n_ff, n_embd]
  Affine ffn_down;     // ffn_down     [n_embd, n_ff]
};

struct Weights {
  Tensor token_embd;     // [n_vocab, n_embd]
  Tensor position_embd;  // [n_ctx_train, n_embd] f32
  std::vector<Layer> layers;
  Affine output_norm;  // [n_embd]
  Affine output;       // [n_vocab, n_embd]; token_embd where the file has none (tied)

  std::vector<Buffer> owned;  // what the back end could not read from the mapped file
};

// The tensors stay valid as long as `file` and `backend`. Throws FormatError naming the tensor,
// its shape or type and the expected one.
Weights load_weights(const GgufFile& file, const Config& config, Backend& backend);

}  // namespace h2o
