// The forward pass of all model families. Start reading here.
#include "model/forward.h"

#include "model/feed_forward.h"
#include "model/latent_attention.h"
#include "model/layer_embeddings.h"

namespace h2o {
namespace {

// y and x [n, n_heads * head_dim] viewed as rows of the norm's length: one head or all heads.
void norm_heads(Backend& b, const Config& c, const Tensor& y, const Tensor& x,
                const Tensor& weight) {
  const auto rows = [&](const Tensor& t) {
    return Tensor{t.data, t.dtype, t.rows * t.cols / weight.cols, weight.cols};
  };
  b.rms_norm(rows(y), rows(x), weight, c.norm_eps);
}
void norm_heads(Backend& b, const Config& c, const Tensor& x, const Tensor& weight) {
  norm_heads(b, c, x, x, weight);
}

Rope rope_of(const Config& c, const Weights& w, int32_t layer, int32_t n_ctx) {
  if (!c.rotates(layer)) return {};
  return c.rotates_by_window(layer) ? w.window_rope : w.rope_for(c, n_ctx);
}

// A layer's first block, which adds x projected by w to the residual.
struct Mixed {
  const Tensor& x;
  const Affine& w;
};

// Computes a.q, a.k and a.v, where the layer has them, from the block's input x, and a.attn_gate.
void project(Backend& b, const Config& c, const Weights& w, int32_t l, const Activations& a,
             const Tensor& x) {
  const Layer& layer = w.layers[l];
  const bool gated = c.family->attn_gate;
  if (layer.attn_v.weight) {
    b.matmul({{gated ? a.q_and_gate : a.q, layer.attn_q}, {a.k, layer.attn_k}, {a.v, layer.attn_v}},
             x);
  } else if (layer.attn_k.weight) {
    b.matmul({{a.q, layer.attn_q}, {a.k, layer.attn_k}}, x);
  } else {
    return b.matmul(a.q, x, layer.attn_q);
  }
  if (gated) b.split_blocks(a.q, a.attn_gate, a.q_and_gate, c.head_dim);
  if (c.qkv_clamp > 0) {
    for (const Tensor& t : {a.q, a.k, a.v}) b.clamp(t, c.qkv_clamp);
  }
  if (c.family->v_norm) {
    const Tensor ones{w.ones.data, w.ones.dtype, 1, c.sizes(l).head_dim};
    norm_heads(b, c, a.v, layer.attn_v.weight ? a.v : a.k, ones);
  }
}

// Attention to the block's input x.
Mixed attend(Backend& b, const Config& c, const Weights& w, int32_t l, const Batch& batch,
             const KvCache& cache, const Activations& a, const Tensor& x) {
  const Layer& layer = w.layers[l];
  const bool latent = c.family->latent;
  latent ? latent_queries(b, c, layer, a, x) : project(b, c, w, l, a, x);
  Rope rope = rope_of(c, w, l, cache.shape().max_tokens);
  if (c.normalizes_rotated() && rope.layout != RopeLayout::none) {
    b.rotate(a.q, a.k, c.head_dim, rope, batch);
    rope = {};
  }
  if (layer.attn_q_norm) {
    norm_heads(b, c, a.q, layer.attn_q_norm);
    if (layer.attn_k_norm) norm_heads(b, c, a.k, layer.attn_k_norm);
  }
  if (c.scales_queries(l)) {
    b.scale_by_position(a.q, c.temperature_scale, c.temperature_length,
                        c.family->block_windows ? 1 : 0, batch);
  }
  const bool stores = c.kv_source(l) == l;
  const Attention attention{.out = a.attn,
                            .q = a.q,
                            .k = stores ? a.k : Tensor{},
                            .v = !stores  ? Tensor{}
                                 : latent ? a.k
                                          : a.v,
                            .rope = rope,
                            .scale = c.attn_scale,
                            .window = c.window(l),
                            .in_blocks = c.family->block_windows,
                            .softcap = c.attn_softcap,
                            .sinks = layer.attn_sinks,
                            .slopes = w.alibi_slopes,
                            .allow_bf16 = layer.attn_output.weight.dtype != DType::f32,
                            .evicts = c.reads_last(l)};
  if (c.family->encoder) {
    b.attend_whole(attention, c.sizes(l).head_dim, batch);
  } else {
    b.attend(attention, cache.layer(l), batch);
  }
  if (c.family->attn_gate) b.apply_gate(Gate::sigmoid, a.attn, a.attn_gate);
  if (latent) latent_values(b, c, layer, a);
  return {latent ? a.latent.out : a.attn, layer.attn_output};
}

// Computes a.delta.out from the block's input x.
void delta_net(Backend& b, const Config& c, const DeltaNetLayer& layer, const KvView& cache,
               const Batch& batch, const DeltaNetActivations& a, const Tensor& x) {
  const DeltaNetConfig& d = c.delta_net;
  b.matmul({{a.qkv, layer.qkv}, {a.gate, layer.gate}}, x);
  if (c.family->delta_adjacent) {
    b.matmul(a.beta_alpha, x, layer.beta_alpha);
    b.split_blocks(a.beta, a.alpha, a.beta_alpha, d.n_v_heads / d.n_k_heads);
  } else {
    b.matmul({{a.alpha, layer.alpha}, {a.beta, layer.beta}}, x);
  }
  b.delta_net({.out = a.out,
               .qkv = a.qkv,
               .alpha = a.alpha,
               .beta = a.beta,
               .conv = layer.conv,
               .a = layer.a,
               .dt_bias = layer.dt_bias,
               .n_k_heads = d.n_k_heads,
               .n_v_heads = d.n_v_heads,
               .head_dim = d.head_dim,
               .adjacent = c.family->delta_adjacent},
              cache, batch);
  norm_heads(b, c, a.out, layer.norm);
  b.apply_gate(Gate::swiglu, a.out, a.gate);
}

// Computes a.state_space.out from the block's input x.
void state_space(Backend& b, const Config& c, const StateSpaceLayer& layer, const KvView& cache,
                 const Batch& batch, const StateSpaceActivations& a, const Tensor& x) {
  const StateSpaceConfig& s = c.state_space;
  b.matmul({{a.gate, layer.gate}, {a.xbc, layer.xbc}, {a.dt, layer.dt}}, x);
  b.state_space({.out = a.out,
                 .gate = a.gate,
                 .xbc = a.xbc,
                 .dt = a.dt,
                 .decay = a.decay,
                 .conv = layer.conv,
                 .conv_bias = layer.conv_bias,
                 .a = layer.a,
                 .d = layer.d,
                 .dt_bias = layer.dt_bias,
                 .norm = layer.norm,
                 .norm_eps = c.norm_eps,
                 .n_heads = s.n_heads,
                 .head_dim = s.head_dim,
                 .n_groups = s.n_groups,
                 .d_state = s.d_state},
                cache, batch);
}

// Attention, or what the layer has instead, of the block's input x.
Mixed mix(Backend& b, const Config& c, const Weights& w, int32_t l, const Batch& batch,
          const KvCache& cache, const Activations& a, const Tensor& x) {
  const Layer& layer = w.layers[l];
  if (!c.recurrent(l)) return attend(b, c, w, l, batch, cache, a, x);
  if (c.family->delta_net) {
    delta_net(b, c, layer.delta, cache.layer(l), batch, a.delta, x);
    return {a.delta.out, layer.delta.output};
  }
  if (c.family->state_space) {
    state_space(b, c, layer.state_space, cache.layer(l), batch, a.state_space, x);
    const Mixed mixed = {a.state_space.out, layer.state_space.output};
    if (!c.attends(l)) return mixed;
    add_block(b, c, a, mixed.x, mixed.w, {});  // both are added
    return attend(b, c, w, l, batch, cache, a, x);
  }
  b.matmul(a.short_conv.bcx, x, layer.short_conv.input);
  b.short_conv({a.short_conv.out, a.short_conv.bcx, layer.short_conv.conv}, cache.layer(l), batch);
  return {a.short_conv.out, layer.short_conv.output};
}

// Replaces the embeddings a.x by the projection of them and of the hidden states.
void fuse(Backend& b, const Config& c, const Fusion& fusion, const Activations& a) {
  norm(b, c, a.h, a.x, fusion.embd_norm);
  norm(b, c, a.hidden, a.hidden, fusion.hidden_norm);
  const auto put = [&](const Tensor& x, int64_t half) {
    b.copy_heads({a.fused.floats() + half * x.cols, a.fused.cols, 0}, {x.floats(), x.cols, 0},
                 x.rows, 1, x.cols);
  };
  put(a.h, 0);
  put(a.hidden, 1);
  b.matmul(a.x, a.fused, fusion.projection);
}

}  // namespace

void forward(Backend& b, const Config& c, const Weights& w, const Batch& batch,
             const KvCache& cache, const Activations& buffers) {
  const Activations all = first(buffers, batch.n_rows(), 0);
  const Tensor& input = c.family->pre_norms ? all.h : all.x;  // of a layer's second block

  b.embed(all.x, w.token_embd, batch);
  if (c.embedding_scale != 1) b.scale(all.x, c.embedding_scale);
  if (w.position_embd) b.add_positions(all.x, w.position_embd, batch);
  if (w.token_norm.weight) norm(b, c, all.x, all.x, w.token_norm);
  if (w.layer_embd) embed_for_layers(b, c, w, batch, all);
  if (c.predicts) fuse(b, c, w.fusion, all);
  for (int32_t l = 0; l < c.n_layers; ++l) {
    const Layer& layer = w.layers[l];
    const Activations a = in_layer(all, c, l);
    if (w.residency) w.residency->prepare(l);

    if (layer.attn_norm.weight) norm(b, c, a.h, a.x, layer.attn_norm);
    if (!c.mixes(l)) {
      feed_forward(b, c, w, l, a, input);
      continue;
    }
    const Mixed mixed = mix(b, c, w, l, batch, cache, a, layer.attn_norm.weight ? a.h : a.x);

    // Parallel branches read the same x; otherwise the second reads the sum after the first.
    if (!c.parallel_residual) {
      add_block(b, c, a, mixed.x, mixed.w, layer.attn_post_norm);
    }
    if (layer.ffn_norm.weight) norm(b, c, a.h, a.x, layer.ffn_norm);
    if (c.parallel_residual) b.matmul_add(a.x, mixed.x, mixed.w);
    if (!c.has_ff(l)) continue;

    feed_forward(b, c, w, l, a, input);
    if (w.layer_embd) add_layer_embedding(b, c, layer, l, a);
    if (layer.output_scale != 1) b.scale(a.x, layer.output_scale);
  }
}

void read_hidden(Backend& b, const Config& c, const Weights& w, const Batch& batch,
                 const Activations& buffers) {
  const Activations a =
      first(buffers, batch.n_rows(), static_cast<int64_t>(batch.logits_rows.size()));
  b.gather(a.last, a.x, batch);
  if (w.output_norm.weight) norm(b, c, a.last, a.last, w.output_norm);
  if (!w.dense_3.weight) return;
  b.matmul(a.dense_2, a.last, w.dense_2);
  b.matmul(a.dense_3, a.dense_2, w.dense_3);
}

void score_labels(Backend& b, const Config& c, const Weights& w, const Batch& batch,
                  const Activations& buffers) {
  const Activations a =
      first(buffers, batch.n_rows(), static_cast<int64_t>(batch.logits_rows.size()));
  read_hidden(b, c, w, batch, buffers);
  Tensor x = a.last;
  if (w.classifier.weight) {
    x = a.h.first(x.rows);
    b.matmul(x, a.last, w.classifier);
    b.softcap(x, 1);  // tanh
  }
  b.matmul(a.labels, x, w.labels);
}

void unembed(Backend& b, const Config& c, const Weights& w, const Batch& batch,
             const Activations& buffers) {
  const Activations a =
      first(buffers, batch.n_rows(), static_cast<int64_t>(batch.logits_rows.size()));
  read_hidden(b, c, w, batch, buffers);
  b.matmul(a.logits, a.last, w.output);
  if (c.logit_scale != 1) b.scale(a.logits, c.logit_scale);
  if (c.logit_softcap > 0) b.softcap(a.logits, c.logit_softcap);
}

}  // namespace h2o
