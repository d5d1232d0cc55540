// The model. Start reading here.
#include "model/forward.h"

#include <cmath>

namespace h2o {

void forward(Backend& b, const Config& c, const Weights& w, const Batch& batch,
             const KvCache& cache, const Activations& buffers) {
  const Activations a = first(buffers, batch.n_rows(), 0);
  const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));

  b.embed(a.x, w.token_embd, batch);
  b.add_positions(a.x, w.position_embd, batch);
  for (int32_t l = 0; l < c.n_layers; ++l) {
    const Layer& layer = w.layers[l];

    b.layer_norm(a.h, a.x, layer.attn_norm, c.norm_eps);
    b.matmul(a.q, a.h, layer.attn_q);
    b.matmul(a.k, a.h, layer.attn_k);
    b.matmul(a.v, a.h, layer.attn_v);
    b.attend({a.attn, a.q, a.k, a.v, scale}, cache.layer(l), batch);
    b.matmul_add(a.x, a.attn, layer.attn_output);

    b.layer_norm(a.h, a.x, layer.ffn_norm, c.norm_eps);
    b.matmul(a.up, a.h, layer.ffn_up);
    b.relu(a.up);
    b.matmul_add(a.x, a.up, layer.ffn_down);
  }
}

void unembed(Backend& b, const Config& c, const Weights& w, const Batch& batch,
             const Activations& buffers) {
  const Activations a =
      first(buffers, batch.n_rows(), static_cast<int64_t>(batch.logits_rows.size()));
  b.gather(a.last, a.x, batch);
  b.layer_norm(a.last, a.last, w.output_norm, c.norm_eps);
  b.matmul(a.logits, a.last, w.output);
}

}  // namespace h2o
