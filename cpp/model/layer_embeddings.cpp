#include "model/layer_embeddings.h"

#include <cmath>
#include <numbers>

namespace h2o {

void embed_for_layers(Backend& b, const Config& c, const Weights& w, const Batch& batch,
                      const Activations& a) {
  const LayerEmbeddings& e = a.layers;
  b.embed(e.embd, w.layer_embd, batch);
  b.scale(e.embd, std::sqrt(static_cast<float>(c.n_layer_embd)));
  b.matmul(e.projected, a.x, w.layer_proj);
  b.scale(e.projected, 1 / std::sqrt(static_cast<float>(c.n_embd)));
  const Tensor rows{e.projected.data, DType::f32, e.projected.rows * c.n_layers, c.n_layer_embd};
  b.rms_norm(rows, rows, w.layer_proj_norm, c.norm_eps);
  b.add(e.embd, e.projected);
  b.scale(e.embd, std::numbers::sqrt2_v<float> / 2);
}

void add_layer_embedding(Backend& b, const Config& c, const Layer& layer, int32_t l,
                         const Activations& a) {
  const LayerEmbeddings& e = a.layers;
  const int64_t n = c.n_layer_embd;
  b.copy_heads({e.input.floats(), n, n}, {e.embd.floats() + l * n, e.embd.cols, n}, e.input.rows, 1,
               n);
  b.matmul(e.gate, a.x, layer.input_gate);
  b.apply_gate(c.family->gate, e.input, e.gate);
  b.matmul(a.h, e.input, layer.input_proj);
  b.rms_norm(a.h, a.h, layer.input_post_norm.weight, c.norm_eps);
  b.add(a.x, a.h);
}

}  // namespace h2o
