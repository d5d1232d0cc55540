#include "model/mixture.h"

namespace h2o {

void add_mixture(Backend& b, const Config& c, const Weights& w, int32_t layer,
                 const Activations& a) {
  const Mixture& m = w.layers[layer].mixture;
  const MixtureActivations& e = a.experts;
  b.matmul(e.logits, a.h, m.router);
  b.route(e.routes, e.logits, m.selection_bias);
  if (w.experts) {
    w.experts->load(layer, {e.routes.offsets, static_cast<size_t>(e.routes.n_experts) + 1});
  }
  b.dispatch(e.x, a.h, e.routes);
  b.matmul_experts({{e.up, m.up}, {e.gate, m.gate}}, e.x, e.routes);
  b.apply_gate(c.family->gate, e.up, e.gate);
  b.matmul_experts({{e.x, m.down}}, e.up, e.routes);
  b.combine_add(a.x, e.x, e.routes);

  if (c.mixture.n_ff_shared == 0) return;
  b.matmul_gated(c.family->gate, {e.shared_up, m.shared_up}, {e.shared_gate, m.shared_gate}, a.h);
  if (m.shared_router.weight) {
    b.matmul(e.shared_logit, a.h, m.shared_router);
    b.gate_rows(e.shared_up, e.shared_logit);
  }
  if (c.residual_scale != 1) b.scale(e.shared_up, c.residual_scale);  // as the others' weights are
  b.matmul_add(a.x, e.shared_up, m.shared_down);
}

}  // namespace h2o
