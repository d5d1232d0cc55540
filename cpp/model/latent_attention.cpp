#include "model/latent_attention.h"

namespace h2o {
namespace {

// The heads of x [n, n_heads * width], each from dimension `first` on.
Heads in_rows(const Tensor& x, int64_t n_heads, int64_t first = 0) {
  return {x.floats() + first, x.cols, x.cols / n_heads};
}

// The heads of x [n_heads * n, width].
Heads by_head(const Tensor& x, int64_t n_heads) {
  return {x.floats(), x.cols, x.rows / n_heads * x.cols};
}

// y = x w^T with the matrix of each head.
void multiply_heads(Backend& b, const Config& c, const Tensor& y, const Affine& w,
                    const Tensor& x) {
  Routes heads{};
  heads.n_experts = c.n_heads;
  b.matmul_experts({{y, w}}, x, heads);
}

}  // namespace

void latent_queries(Backend& b, const Config& c, const Layer& layer, const Activations& a,
                    const Tensor& x) {
  const LatentLayer& w = layer.latent;
  const LatentActivations& m = a.latent;
  const int64_t n = x.rows, h = c.n_heads, n_rot = c.rope.n_rot, rank = c.latent.rank;
  const int64_t n_plain = c.latent.head_dim - n_rot;
  if (c.latent.q_rank > 0) {
    b.matmul({{m.q_a, w.q_a}, {m.kv, w.kv_a}}, x);
    b.rms_norm(m.q_a, m.q_a, w.q_norm, c.norm_eps);
    b.matmul(m.q, m.q_a, w.q_b);
  } else {
    b.matmul({{m.q, layer.attn_q}, {m.kv, w.kv_a}}, x);
  }
  // A product with a key is one of the query, multiplied with the key's matrix, and the latent.
  b.copy_heads(by_head(m.q_plain, h), in_rows(m.q, h), n, h, n_plain);
  multiply_heads(b, c, m.by_head, w.k_b, m.q_plain);
  b.copy_heads(in_rows(a.q, h), in_rows(m.q, h, n_plain), n, h, n_rot);
  b.copy_heads(in_rows(a.q, h, n_rot), by_head(m.by_head, h), n, h, rank);

  b.copy_heads(in_rows(m.latent, 1), in_rows(m.kv, 1), n, 1, rank);
  b.rms_norm(m.latent, m.latent, w.kv_norm, c.norm_eps);
  b.copy_heads(in_rows(a.k, 1), in_rows(m.kv, 1, rank), n, 1, n_rot);
  b.copy_heads(in_rows(a.k, 1, n_rot), in_rows(m.latent, 1), n, 1, rank);
}

void latent_values(Backend& b, const Config& c, const Layer& layer, const Activations& a) {
  const LatentActivations& m = a.latent;
  const int64_t n = a.attn.rows, h = c.n_heads;
  b.copy_heads(by_head(m.by_head, h), in_rows(a.attn, h, c.rope.n_rot), n, h, c.latent.rank);
  multiply_heads(b, c, m.v, layer.latent.v_b, m.by_head);
  b.copy_heads(in_rows(m.out, h), by_head(m.v, h), n, h, c.latent.v_dim);
}

}  // namespace h2o
