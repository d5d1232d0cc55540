#include "model/feed_forward.h"

namespace h2o {
namespace {

// The activation of a block without a gate.
void activate(Backend& b, const Config& c, int32_t l, const Tensor& up) {
  if (c.family->activation == Activation::relu) {
    b.relu(up);
  } else if (c.family->activation == Activation::relu_squared) {
    b.relu_squared(up);
  } else if (c.family->activation == Activation::xielu) {
    b.xielu(up, c.xielu[l]);
  } else {
    c.gelu_erf ? b.gelu_erf(up) : b.gelu_tanh(up);
  }
}

// Computes `up`, the input of a block's last matrix, from the block's input x.
void compute_up(Backend& b, const Config& c, int32_t l, const Product& up, const Product& gate,
                const Tensor& x) {
  const bool gated = c.family->activation == Activation::gated;
  if (gated && c.gelu_erf) {
    b.matmul({up, gate}, x);
    b.gelu_erf(gate.y);
    b.multiply(up.y, gate.y);
  } else if (gated) {
    b.matmul_gated(c.gate, up, gate, x);
  } else {
    b.matmul({up}, x);
    activate(b, c, l, up.y);
  }
}

// y += output of the experts selected for each row of a.h by a.experts.logits.
void add_experts(Backend& b, const Config& c, const Weights& w, int32_t layer, const Activations& a,
                 const Tensor& y) {
  const Mixture& m = w.layers[layer].mixture;
  const MixtureActivations& e = a.experts;
  Routes routes = e.routes;
  if (m.expert_scales) routes.expert_scales = m.expert_scales.floats();
  b.route(routes, e.logits, m.selection_bias);
  if (w.residency) {
    w.residency->prepare_experts(layer,
                                 {routes.offsets, static_cast<size_t>(routes.n_experts) + 1});
  }
  b.dispatch(e.x, a.h, routes);
  if (m.gate_up.weight) {
    const int64_t n = e.up.cols;
    b.matmul_experts({{e.up, m.gate_up, n, 2 * n}, {e.gate, m.gate_up, 0, 2 * n}}, e.x, routes);
  } else if (m.gate.weight) {
    b.matmul_experts({{e.up, m.up}, {e.gate, m.gate}}, e.x, routes);
  } else {
    b.matmul_experts({{e.up, m.up}}, e.x, routes);
    activate(b, c, layer, e.up);
  }
  if (e.gate.rows > 0) b.apply_gate(c.gate, e.up, e.gate);
  b.matmul_experts({{e.x, m.down}}, e.up, routes);
  b.combine_add(y, e.x, routes);
}

// a.x += output of the experts selected for each row of a.h, and of the shared expert.
void add_mixture(Backend& b, const Config& c, const Weights& w, int32_t layer,
                 const Activations& a) {
  const Mixture& m = w.layers[layer].mixture;
  const MixtureActivations& e = a.experts;
  b.matmul(e.logits, a.h, m.router);
  add_experts(b, c, w, layer, a, a.x);

  if (c.mixture.n_ff_shared == 0) return;
  compute_up(b, c, layer, {e.shared_up, m.shared_up}, {e.shared_gate, m.shared_gate}, a.h);
  if (m.shared_router.weight) {
    b.matmul(e.shared_logit, a.h, m.shared_router);
    b.gate_rows(e.shared_up, e.shared_logit);
  }
  if (c.residual_scale != 1) b.scale(e.shared_up, c.residual_scale);  // as the others' weights are
  b.matmul_add(a.x, e.shared_up, m.shared_down);
}

// Adds an MLP of the input a.h and experts of a.x, with norms of their own, to the residual a.x.
void add_mlp_and_experts(Backend& b, const Config& c, const Weights& w, int32_t l,
                         const Activations& a) {
  const Layer& layer = w.layers[l];
  const Mixture& m = layer.mixture;
  const MixtureActivations& e = a.experts;
  compute_up(b, c, l, {a.up, layer.ffn_up}, {a.gate, layer.ffn_gate}, a.h);
  b.matmul(e.mlp, a.up, layer.ffn_down);
  norm(b, c, e.mlp, e.mlp, m.mlp_post_norm);

  norm(b, c, a.h, a.x, m.router_norm);
  b.matmul(e.logits, a.h, m.router);
  norm(b, c, a.h, a.x, m.pre_norm);
  const int64_t n = c.n_embd;
  b.copy_heads({e.sum.floats(), n, n}, {w.zeros.floats(), 0, 0}, e.sum.rows, 1, n);
  add_experts(b, c, w, l, a, e.sum);
  norm(b, c, e.sum, e.sum, m.post_norm);

  b.add(e.mlp, e.sum);
  norm(b, c, e.mlp, e.mlp, layer.ffn_post_norm);
  b.add(a.x, e.mlp);
}

}  // namespace

void norm(Backend& b, const Config& c, const Tensor& y, const Tensor& x, const Affine& w) {
  if (c.family->norm == NormKind::layer) {
    b.layer_norm(y, x, w, c.norm_eps);
  } else {
    b.rms_norm(y, x, w.weight, c.norm_eps);
  }
}

void add_block(Backend& b, const Config& c, const Activations& a, const Tensor& from,
               const Affine& w, const Affine& post_norm) {
  if (c.family->sum_norms) {
    b.matmul_add(a.x, from, w);
    norm(b, c, a.x, a.x, post_norm);
  } else if (post_norm.weight) {
    b.matmul(a.h, from, w);
    norm(b, c, a.h, a.h, post_norm);
    b.add(a.x, a.h);
  } else {
    if (c.residual_scale != 1) b.scale(from, c.residual_scale);
    b.matmul_add(a.x, from, w);
  }
}

void feed_forward(Backend& b, const Config& c, const Weights& w, int32_t l, const Activations& a,
                  const Tensor& input) {
  const Layer& layer = w.layers[l];
  if (!c.has_experts(l)) {
    compute_up(b, c, l, {a.up, layer.ffn_up}, {a.gate, layer.ffn_gate}, input);
    add_block(b, c, a, a.up, layer.ffn_down, layer.ffn_post_norm);
  } else if (c.family->experts_beside_mlp) {
    add_mlp_and_experts(b, c, w, l, a);
  } else {
    add_mixture(b, c, w, l, a);
  }
}

}  // namespace h2o
