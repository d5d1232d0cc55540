#include "model/output_gram.h"

#include <algorithm>
#include <vector>

#include "model/latent_attention.h"

namespace h2o {

Buffer compute_output_gram(Model& model, std::span<const KvPolicy> policies) {
  if (std::ranges::none_of(policies, &KvPolicy::weighs_outputs)) return {};
  const Config& c = model.config;
  Backend& b = *model.backend;
  const int64_t square = int64_t{c.head_dim} * c.head_dim;
  const auto matrix = [](Buffer& buffer, int64_t rows, int64_t cols) {
    return Tensor{buffer.data(), DType::f32, rows, cols};
  };
  Buffer grams = b.allocate(c.n_layers * c.n_kv_heads * square * sizeof(float));
  Buffer some_units = b.allocate(c.n_heads * square * sizeof(float));
  Buffer some_columns = b.allocate(int64_t{c.head_dim} * c.n_embd * sizeof(float));
  const bool latent = c.latent.rank > 0;
  Buffer storage;
  Activations a;
  if (latent) a = allocate_activations(b, c, c.head_dim, 1, storage);

  // Multiplying unit vectors gives W_O's columns in whatever layout the back end stores it.
  std::vector<float> unit_rows(c.n_heads * square);
  for (int32_t l = 0; l < c.n_layers; ++l) {
    if (!c.attends(l)) continue;
    if (!policies[policies.size() == 1 ? 0 : l].weighs_outputs()) continue;
    const int64_t head_dim = c.sizes(l).head_dim, width = c.n_heads * head_dim;
    const int32_t group = c.n_heads / c.sizes(l).n_kv_heads;
    const Tensor units = matrix(some_units, head_dim, width);
    const Tensor columns = matrix(some_columns, head_dim, c.n_embd);
    a.attn = units;
    for (int32_t h = 0; h < c.n_heads; ++h) {
      std::ranges::fill(unit_rows, 0.0f);
      for (int64_t i = 0; i < head_dim; ++i) unit_rows[i * width + h * head_dim + i] = 1;
      b.write(units.data, unit_rows.data(), units.bytes());
      // All layers that read the values add to the sum.
      const int64_t at = c.kv_source(l) * c.n_kv_heads * square + h / group * head_dim * head_dim;
      const Tensor gram{grams.data() + at * sizeof(float), DType::f32, head_dim, head_dim};
      b.run(Batch{}, [&] {
        if (model.weights.residency) model.weights.residency->prepare(l);
        const Layer& layer = model.weights.layers[l];
        if (latent) latent_values(b, c, layer, a);
        b.matmul(columns, latent ? a.latent.out : units, {layer.attn_output.weight, {}});
      });
      b.run(Batch{}, [&] { b.matmul_add(gram, columns, {columns, {}}); });
    }
  }
  return grams;
}

}  // namespace h2o
