#include "model/activations.h"

#include <vector>

#include "core/layout.h"

namespace h2o {
namespace {

Tensor matrix(int64_t rows, int64_t cols) { return {nullptr, DType::f32, rows, cols}; }

MixtureActivations mixture_activations(const Config& c, int64_t n_rows) {
  const MixtureConfig& m = c.mixture;
  const int64_t n_copies = m.n_experts > 0 ? n_rows * m.n_used : 0;
  const bool gated = c.family->activation == Activation::gated;
  const int64_t n_shared = m.n_ff_shared > 0 ? n_rows : 0;
  const int64_t n_beside = n_copies > 0 && c.family->experts_beside_mlp ? n_rows : 0;
  return {
      .logits = matrix(n_copies > 0 ? n_rows : 0, m.n_experts),
      .x = matrix(n_copies, c.n_embd),
      .up = matrix(n_copies, m.n_ff),
      .gate = matrix(gated ? n_copies : 0, m.n_ff),
      .shared_up = matrix(n_shared, m.n_ff_shared),
      .shared_gate = matrix(gated ? n_shared : 0, m.n_ff_shared),
      .shared_logit = matrix(n_shared, 1),
      .mlp = matrix(n_beside, c.n_embd),
      .sum = matrix(n_beside, c.n_embd),
      .routes = {.n_experts = m.n_experts,
                 .n_used = m.n_used,
                 .sigmoid = m.sigmoid,
                 .spread = c.family->mixer_spread,
                 .n_groups = m.n_groups,
                 .n_groups_used = m.n_groups_used,
                 .normalized = m.normalized,
                 .scale = m.scale,
                 .scales_inputs = c.family->scales_inputs,
                 .weights = nullptr,
                 .copy_rows = nullptr,
                 .offsets = nullptr},
  };
}

MixtureActivations first(const MixtureActivations& e, int64_t n_rows) {
  if (e.routes.n_experts == 0) return e;
  const int64_t n_shared = e.shared_up.rows > 0 ? n_rows : 0;
  const int64_t n_beside = e.mlp.rows > 0 ? n_rows : 0;
  return {
      .logits = e.logits.first(n_rows),
      .x = e.x.first(n_rows * e.routes.n_used),
      .up = e.up.first(n_rows * e.routes.n_used),
      .gate = e.gate.first(e.gate.rows > 0 ? n_rows * e.routes.n_used : 0),
      .shared_up = e.shared_up.first(n_shared),
      .shared_gate = e.shared_gate.first(e.shared_gate.rows > 0 ? n_shared : 0),
      .shared_logit = e.shared_logit.first(n_shared),
      .mlp = e.mlp.first(n_beside),
      .sum = e.sum.first(n_beside),
      .routes = e.routes,
  };
}

LatentActivations latent_activations(const Config& c, int64_t n_rows) {
  const LatentConfig& m = c.latent;
  if (m.rank == 0) n_rows = 0;
  const int64_t by_head = n_rows * c.n_heads;
  return {
      .q_a = matrix(m.q_rank > 0 ? n_rows : 0, m.q_rank),
      .q = matrix(n_rows, int64_t{c.n_heads} * m.head_dim),
      .q_plain = matrix(by_head, m.head_dim - c.rope.n_rot),
      .kv = matrix(n_rows, m.rank + c.rope.n_rot),
      .latent = matrix(n_rows, m.rank),
      .by_head = matrix(by_head, m.rank),
      .v = matrix(by_head, m.v_dim),
      .out = matrix(n_rows, int64_t{c.n_heads} * m.v_dim),
  };
}

LatentActivations first(const LatentActivations& m, int64_t n_rows) {
  if (m.q.rows == 0) return m;
  const int64_t by_head = m.by_head.rows / m.q.rows * n_rows;
  return {
      .q_a = m.q_a.first(m.q_a.rows > 0 ? n_rows : 0),
      .q = m.q.first(n_rows),
      .q_plain = m.q_plain.first(by_head),
      .kv = m.kv.first(n_rows),
      .latent = m.latent.first(n_rows),
      .by_head = m.by_head.first(by_head),
      .v = m.v.first(by_head),
      .out = m.out.first(n_rows),
  };
}

DeltaNetActivations delta_net_activations(const Config& c, int64_t n_rows) {
  const DeltaNetConfig& d = c.delta_net;
  if (d.n_taps == 0) n_rows = 0;
  return {
      .qkv = matrix(n_rows, d.n_channels()),
      .gate = matrix(n_rows, d.v_width()),
      .alpha = matrix(n_rows, d.n_v_heads),
      .beta = matrix(n_rows, d.n_v_heads),
      .beta_alpha = matrix(c.family->delta_adjacent ? n_rows : 0, 2 * d.n_v_heads),
      .out = matrix(n_rows, d.v_width()),
  };
}

DeltaNetActivations first(const DeltaNetActivations& d, int64_t n_rows) {
  if (d.qkv.rows == 0) return d;
  return {
      .qkv = d.qkv.first(n_rows),
      .gate = d.gate.first(n_rows),
      .alpha = d.alpha.first(n_rows),
      .beta = d.beta.first(n_rows),
      .beta_alpha = d.beta_alpha.first(d.beta_alpha.rows > 0 ? n_rows : 0),
      .out = d.out.first(n_rows),
  };
}

StateSpaceActivations state_space_activations(const Config& c, int64_t n_rows) {
  const StateSpaceConfig& s = c.state_space;
  if (s.n_taps == 0) n_rows = 0;
  return {
      .gate = matrix(n_rows, s.width()),
      .xbc = matrix(n_rows, s.n_channels()),
      .dt = matrix(n_rows, s.n_heads),
      .decay = matrix(n_rows, s.n_heads),
      .out = matrix(n_rows, s.width()),
  };
}

StateSpaceActivations first(const StateSpaceActivations& s, int64_t n_rows) {
  if (s.out.rows == 0) return s;
  return {s.gate.first(n_rows), s.xbc.first(n_rows), s.dt.first(n_rows), s.decay.first(n_rows),
          s.out.first(n_rows)};
}

LayerEmbeddings layer_embeddings(const Config& c, int64_t n_rows) {
  const int64_t n = c.n_layer_embd;
  if (n == 0) n_rows = 0;
  return {
      .embd = matrix(n_rows, c.n_layers * n),
      .projected = matrix(n_rows, c.n_layers * n),
      .input = matrix(n_rows, n),
      .gate = matrix(n_rows, n),
  };
}

LayerEmbeddings first(const LayerEmbeddings& e, int64_t n_rows) {
  if (e.embd.rows == 0) return e;
  return {e.embd.first(n_rows), e.projected.first(n_rows), e.input.first(n_rows),
          e.gate.first(n_rows)};
}

// Does a layer have an MLP?
bool has_mlp(const Config& c) {
  if (c.family->experts_beside_mlp) return true;
  for (int32_t l = 0; l < c.n_layers; ++l) {
    if (c.has_ff(l) && !c.has_experts(l)) return true;
  }
  return false;
}

// Activations without memory.
Activations shapes(const Config& c, int32_t n_rows, int32_t n_logits) {
  const int64_t q_width = int64_t{c.n_heads} * c.head_dim;
  const int64_t kv_width = int64_t{c.n_kv_heads} * c.head_dim;
  const bool dense = has_mlp(c);
  const bool gated = c.family->activation == Activation::gated && dense;
  return {
      .x = matrix(n_rows, c.n_embd),
      .h = matrix(n_rows, c.n_embd),
      .hidden = matrix(c.predicts ? n_rows : 0, c.n_embd),
      .fused = matrix(c.predicts ? n_rows : 0, int64_t{2} * c.n_embd),
      .q = matrix(n_rows, q_width),
      .k = matrix(n_rows, kv_width),
      .v = matrix(c.latent.rank > 0 ? 0 : n_rows, kv_width),
      .attn = matrix(n_rows, q_width),
      .q_and_gate = matrix(c.family->attn_gate ? n_rows : 0, 2 * q_width),
      .attn_gate = matrix(c.family->attn_gate ? n_rows : 0, q_width),
      .latent = latent_activations(c, n_rows),
      .delta = delta_net_activations(c, n_rows),
      .short_conv = {.bcx = matrix(c.short_conv_taps > 0 ? n_rows : 0, int64_t{3} * c.n_embd),
                     .out = matrix(c.short_conv_taps > 0 ? n_rows : 0, c.n_embd)},
      .state_space = state_space_activations(c, n_rows),
      .layers = layer_embeddings(c, n_rows),
      .up = matrix(dense ? n_rows : 0, c.n_ff),
      .gate = matrix(gated ? n_rows : 0, c.n_ff),
      .experts = mixture_activations(c, n_rows),
      .last = matrix(n_logits, c.n_embd),
      .dense_2 = matrix(c.n_dense_3 > 0 ? n_logits : 0, c.n_dense_2),
      .dense_3 = matrix(c.n_dense_3 > 0 ? n_logits : 0, c.n_dense_3),
      .logits = matrix(c.family->encoder ? 0 : n_logits, c.n_vocab),
      .labels = matrix(c.n_labels > 0 ? n_logits : 0, c.n_labels),
  };
}

std::vector<Tensor*> tensors_of(Activations& a) {
  MixtureActivations& e = a.experts;
  DeltaNetActivations& d = a.delta;
  LatentActivations& m = a.latent;
  StateSpaceActivations& s = a.state_space;
  return {&a.x,
          &a.h,
          &a.hidden,
          &a.fused,
          &a.q,
          &a.k,
          &a.v,
          &a.attn,
          &a.up,
          &a.gate,
          &a.last,
          &a.dense_2,
          &a.dense_3,
          &a.logits,
          &a.labels,
          &e.x,
          &e.up,
          &e.gate,
          &e.logits,
          &e.shared_up,
          &e.shared_gate,
          &e.shared_logit,
          &e.mlp,
          &e.sum,
          &a.q_and_gate,
          &a.attn_gate,
          &d.qkv,
          &d.gate,
          &d.alpha,
          &d.beta,
          &d.beta_alpha,
          &d.out,
          &a.short_conv.bcx,
          &a.short_conv.out,
          &s.gate,
          &s.xbc,
          &s.dt,
          &s.decay,
          &s.out,
          &m.q_a,
          &m.q,
          &m.q_plain,
          &m.kv,
          &m.latent,
          &m.by_head,
          &m.v,
          &m.out,
          &a.layers.embd,
          &a.layers.projected,
          &a.layers.input,
          &a.layers.gate};
}

// Offsets in one allocation.
struct Offsets {
  Layout layout;
  std::vector<int64_t> tensors;
  int64_t weights, copy_rows, expert_offsets;  // of routes

  explicit Offsets(Activations& a) {
    for (const Tensor* t : tensors_of(a)) tensors.push_back(layout.place(t->bytes()));
    constexpr int64_t kBytes = 4;  // of a float and of an int32_t
    weights = layout.place(a.experts.x.rows * kBytes);
    copy_rows = layout.place(a.experts.x.rows * kBytes);
    expert_offsets = layout.place((a.experts.routes.n_experts + 1) * kBytes);
  }
};

}  // namespace

int64_t activation_bytes(const Config& config, int32_t n_rows, int32_t n_logits) {
  Activations a = shapes(config, n_rows, n_logits);
  return Offsets(a).layout.size();
}

Activations allocate_activations(Backend& backend, const Config& config, int32_t n_rows,
                                 int32_t n_logits, Buffer& storage) {
  Activations a = shapes(config, n_rows, n_logits);
  const Offsets offsets(a);
  storage = backend.allocate(offsets.layout.size());
  const std::vector<Tensor*> tensors = tensors_of(a);
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i]->data = storage.data() + offsets.tensors[i];
  }
  Routes& routes = a.experts.routes;
  routes.weights = reinterpret_cast<float*>(storage.data() + offsets.weights);
  routes.copy_rows = reinterpret_cast<int32_t*>(storage.data() + offsets.copy_rows);
  routes.offsets = reinterpret_cast<int32_t*>(storage.data() + offsets.expert_offsets);
  return a;
}

Activations first(const Activations& a, int64_t n_rows, int64_t n_logits) {
  const auto rows = [&](const Tensor& t) { return t.first(t.rows > 0 ? n_rows : 0); };
  return {
      .x = a.x.first(n_rows),
      .h = a.h.first(n_rows),
      .hidden = rows(a.hidden),
      .fused = rows(a.fused),
      .q = a.q.first(n_rows),
      .k = a.k.first(n_rows),
      .v = rows(a.v),
      .attn = a.attn.first(n_rows),
      .q_and_gate = rows(a.q_and_gate),
      .attn_gate = rows(a.attn_gate),
      .latent = first(a.latent, n_rows),
      .delta = first(a.delta, n_rows),
      .short_conv = {.bcx = rows(a.short_conv.bcx), .out = rows(a.short_conv.out)},
      .state_space = first(a.state_space, n_rows),
      .layers = first(a.layers, n_rows),
      .up = rows(a.up),
      .gate = rows(a.gate),
      .experts = first(a.experts, n_rows),
      .last = a.last.first(n_logits),
      .dense_2 = a.dense_2.first(a.dense_2.rows > 0 ? n_logits : 0),
      .dense_3 = a.dense_3.first(a.dense_3.rows > 0 ? n_logits : 0),
      .logits = a.logits.first(a.logits.rows > 0 ? n_logits : 0),
      .labels = a.labels.first(a.labels.rows > 0 ? n_logits : 0),
  };
}

Activations in_layer(const Activations& a, const Config& c, int32_t layer) {
  Activations mine = a;
  if (c.layer_sizes.empty()) return mine;
  const auto [n_kv_heads, head_dim, n_ff] = c.sizes(layer);
  for (Tensor* q : {&mine.q, &mine.attn}) q->cols = int64_t{c.n_heads} * head_dim;
  for (Tensor* k : {&mine.k, &mine.v}) k->cols = int64_t{n_kv_heads} * head_dim;
  for (Tensor* up : {&mine.up, &mine.gate}) up->cols = n_ff;
  return mine;
}

}  // namespace h2o
