#include "model/activations.h"

#include <vector>

#include "core/layout.h"

namespace h2o {

Activations allocate_activations(Backend& backend, const Config& c, int32_t n_rows,
                                 int32_t n_logits, Buffer& storage) {
  const int64_t q_width = int64_t{c.n_heads} * c.head_dim;
  const int64_t kv_width = int64_t{c.n_kv_heads} * c.head_dim;
  const auto matrix = [](int64_t rows, int64_t cols) {
    return Tensor{nullptr, DType::f32, rows, cols};
  };
  Activations a{
      .x = matrix(n_rows, c.n_embd),
      .h = matrix(n_rows, c.n_embd),
      .q = matrix(n_rows, q_width),
      .k = matrix(n_rows, kv_width),
      .v = matrix(n_rows, kv_width),
      .attn = matrix(n_rows, q_width),
      .up = matrix(n_rows, c.n_ff),
      .gate = matrix(c.family->activation == Activation::swiglu ? n_rows : 0, c.n_ff),
      .last = matrix(n_logits, c.n_embd),
      .logits = matrix(n_logits, c.n_vocab),
  };

  Tensor* const all[] = {&a.x, &a.h, &a.q, &a.k, &a.v, &a.attn, &a.up, &a.gate, &a.last, &a.logits};
  Layout layout;
  std::vector<int64_t> offsets;
  for (const Tensor* t : all) offsets.push_back(layout.place(t->bytes()));
  storage = backend.allocate(layout.size());
  for (size_t i = 0; i < offsets.size(); ++i) all[i]->data = storage.data() + offsets[i];
  return a;
}

Activations first(const Activations& a, int64_t n_rows, int64_t n_logits) {
  return {
      .x = a.x.first(n_rows),
      .h = a.h.first(n_rows),
      .q = a.q.first(n_rows),
      .k = a.k.first(n_rows),
      .v = a.v.first(n_rows),
      .attn = a.attn.first(n_rows),
      .up = a.up.first(n_rows),
      .gate = a.gate.first(n_rows),
      .last = a.last.first(n_logits),
      .logits = a.logits.first(n_logits),
  };
}

}  // namespace h2o
