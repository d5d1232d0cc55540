#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "core/error.h"
#include "core/layout.h"
#include "io/mapped_file.h"
#include "model/find_weights.h"
#include "model/rope.h"

namespace h2o {
namespace {

LayerTensors tensors_of(Layer& layer) {
  LayerTensors all;
  for (Affine* one :
       {&layer.attn_norm, &layer.attn_post_norm, &layer.ffn_post_norm, &layer.attn_q, &layer.attn_k,
        &layer.attn_v, &layer.attn_output, &layer.ffn_norm, &layer.ffn_gate, &layer.ffn_up,
        &layer.ffn_down, &layer.input_gate, &layer.input_proj, &layer.input_post_norm}) {
    all.insert(all.end(), {&one->weight, &one->bias});
  }
  Mixture& m = layer.mixture;
  for (Affine* one :
       {&m.router, &m.gate, &m.up, &m.gate_up, &m.down, &m.shared_router, &m.shared_gate,
        &m.shared_up, &m.shared_down, &m.pre_norm, &m.post_norm, &m.mlp_post_norm}) {
    all.insert(all.end(), {&one->weight, &one->bias});
  }
  LatentLayer& a = layer.latent;
  for (Affine* one : {&a.q_a, &a.q_b, &a.kv_a, &a.k_b, &a.v_b}) {
    all.insert(all.end(), {&one->weight, &one->bias});
  }
  all.insert(all.end(), {&a.q_norm, &a.kv_norm});
  DeltaNetLayer& d = layer.delta;
  ShortConvLayer& s = layer.short_conv;
  StateSpaceLayer& p = layer.state_space;
  for (Affine* one : {&d.qkv, &d.gate, &d.alpha, &d.beta, &d.beta_alpha, &d.output, &s.input,
                      &s.output, &p.gate, &p.xbc, &p.dt, &p.output}) {
    all.insert(all.end(), {&one->weight, &one->bias});
  }
  all.insert(all.end(), {&d.a, &d.dt_bias, &d.norm, &p.conv_bias, &p.a, &p.d, &p.dt_bias, &p.norm});
  all.insert(all.end(), {&m.selection_bias, &m.expert_scales, &layer.attn_q_norm,
                         &layer.attn_k_norm, &layer.attn_sinks});
  return all;
}

ModelTensors tensors_of(Weights& w, const Config& c) {
  ModelTensors tensors;
  tensors.others = {&w.token_embd,      &w.position_embd,      &w.token_norm.weight,
                    &w.token_norm.bias, &w.output_norm.weight, &w.output_norm.bias,
                    &w.output.weight,   &w.output.bias,        &w.labels.weight,
                    &w.labels.bias,     &w.layer_embd,         &w.layer_proj.weight,
                    &w.layer_proj_norm, &w.token_types,        &w.dense_2.weight,
                    &w.dense_3.weight,  &w.classifier.weight,  &w.classifier.bias};
  tensors.n_experts = c.mixture.n_experts;
  for (Layer& layer : w.layers) {
    tensors.layers.push_back(tensors_of(layer));
    Mixture& m = layer.mixture;
    if (m.gate_up.weight) {
      tensors.experts.push_back({&m.gate_up.weight, &m.down.weight});
    } else {
      tensors.experts.push_back({&m.gate.weight, &m.up.weight, &m.down.weight});
    }
  }
  return tensors;
}

Tensor upload_floats(const std::vector<float>& values, Backend& backend,
                     std::vector<Buffer>& owned) {
  owned.push_back(backend.allocate(values.size() * sizeof(float)));
  backend.write(owned.back().data(), values.data(), owned.back().size());
  return {owned.back().data(), DType::f32, 1, std::ssize(values)};
}

// Frequencies from the metadata and the divisors, if any, in the back end's memory.
Tensor upload_frequencies(const GgufShards& model, const RopeConfig& rope, const Tensor& divisors,
                          Backend& backend, std::vector<Buffer>& owned) {
  const std::vector<float> frequencies = rope_frequencies(rope, divisors);
  for (float frequency : frequencies) {
    // Metadata and divisors can each be in range while the result is not.
    if (!std::isfinite(frequency * rope.magnitude)) {
      throw FormatError(concat("[weights] ", model.path(), ": rotary frequency ", frequency,
                               " and magnitude ", rope.magnitude, ", expected finite numbers"));
    }
  }
  return upload_floats(frequencies, backend, owned);
}

Tensor upload_transposed(const Tensor& matrix, Backend& backend, std::vector<Buffer>& owned) {
  std::vector<float> values(matrix.rows * matrix.cols);
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t j = 0; j < matrix.cols; ++j) {
      values[j * matrix.rows + i] = matrix.floats()[i * matrix.cols + j];
    }
  }
  return {upload_floats(values, backend, owned).data, DType::f32, matrix.cols, matrix.rows};
}

// Divides the matrix of keys and values by head, and transposes that of keys.
void divide_keys_and_values(LatentLayer& layer, const Config& c, Backend& backend,
                            std::vector<Buffer>& owned) {
  const int64_t rank = c.latent.rank, n_values = c.latent.v_dim;
  const int64_t n_plain = c.latent.head_dim - c.rope.n_rot, n_both = n_plain + n_values;
  // Multiplying unit vectors transposes a matrix of any type.
  std::vector<Buffer> some;
  const Tensor both = backend.upload(layer.kv_b, some);
  std::vector<float> units(rank * rank);
  for (int64_t i = 0; i < rank; ++i) units[i * rank + i] = 1;
  const Tensor x{upload_floats(units, backend, some).data, DType::f32, rank, rank};
  some.push_back(backend.allocate(rank * both.rows * sizeof(float)));
  const Tensor y{some.back().data(), DType::f32, rank, both.rows};
  backend.run(Batch{}, [&] { backend.matmul(y, x, {both, {}, {}}); });
  std::vector<float> columns(rank * both.rows);
  backend.read(columns.data(), y.data, y.bytes());

  std::vector<float> keys, values;
  for (int64_t h = 0; h < c.n_heads; ++h) {
    for (int64_t r = 0; r < rank; ++r) {
      const auto head = columns.begin() + r * both.rows + h * n_both;
      keys.insert(keys.end(), head, head + n_plain);
    }
    for (int64_t i = n_plain; i < n_both; ++i) {
      for (int64_t r = 0; r < rank; ++r) values.push_back(columns[r * both.rows + h * n_both + i]);
    }
  }
  layer.k_b.weight = {upload_floats(keys, backend, owned).data, DType::f32, c.n_heads * rank,
                      n_plain};
  layer.v_b.weight = {upload_floats(values, backend, owned).data, DType::f32, c.n_heads * n_values,
                      rank};
  layer.kv_b = {};
}

// Weights that are computed, and those in another layout than the file's.
void compute_weights(Weights& w, const GgufShards& model, const Config& c, Backend& backend) {
  if (w.rope.layout != RopeLayout::none) {
    w.rope.frequencies = upload_frequencies(model, c.rope, w.rope.frequencies, backend, w.owned);
  }
  if (w.long_rope.frequencies) {
    Tensor& divisors = w.long_rope.frequencies;
    divisors = upload_frequencies(model, c.rope, divisors, backend, w.owned);
  }
  if (c.alibi_max_bias > 0) {
    w.alibi_slopes = upload_floats(alibi_slopes(c.n_heads, c.alibi_max_bias), backend, w.owned);
  }
  if (c.window_rope.n_rot > 0) {
    const Tensor frequencies = upload_frequencies(model, c.window_rope, {}, backend, w.owned);
    w.window_rope = {c.family->rope, frequencies, c.window_rope.magnitude};
  }
  if (c.family->v_norm || c.unit_norms) {
    w.ones = upload_floats(std::vector<float>(c.head_dim, 1.0f), backend, w.owned);
  }
  if (c.family->experts_beside_mlp && c.mixture.n_experts > 0) {
    w.zeros = upload_floats(std::vector<float>(c.n_embd, 0.0f), backend, w.owned);
    for (Layer& layer : w.layers) {
      Tensor& norm = layer.mixture.router_norm.weight;
      std::vector<float> values(norm.floats(), norm.floats() + c.n_embd);
      for (float& value : values) value /= std::sqrt(static_cast<float>(c.n_embd));
      norm = upload_floats(values, backend, w.owned);
    }
  }
  for (Layer& layer : w.layers) {
    if (layer.latent.kv_b) divide_keys_and_values(layer.latent, c, backend, w.owned);
    for (Tensor* conv : {&layer.delta.conv, &layer.short_conv.conv, &layer.state_space.conv}) {
      if (*conv) *conv = upload_transposed(*conv, backend, w.owned);
    }
  }
}

// Layer norms without a bias in the file add zeros; those without weights multiply by ones.
void complete_norms(Weights& w, const Config& c, Backend& backend) {
  const auto all = [&](float x) {
    return upload_floats(std::vector<float>(c.n_embd, x), backend, w.owned);
  };
  const Tensor zeros = all(0);
  const Tensor ones = c.family->norm_weights ? Tensor() : all(1);
  const auto complete = [&](Affine& norm) {
    if (ones) norm.weight = ones;
    if (norm.weight) norm.bias = zeros;
  };
  if (c.family->embedding_norm) complete(w.token_norm);
  complete(w.output_norm);
  for (Layer& layer : w.layers) {
    complete(layer.attn_norm);
    complete(layer.ffn_norm);
  }
}

// Adds the embeddings of types to those of positions: see Weights::token_types. Without learned
// positions, those of types remain. Texts have two types at most.
void add_token_types(Weights& w, Backend& backend) {
  const Tensor& types = w.token_types;
  const int64_t n = w.position_embd ? w.position_embd.rows : 1;
  const int64_t n_types = std::min<int64_t>(types.rows, 2);
  std::vector<float> positions(n * types.cols), sums(n_types * positions.size());
  std::vector<float> rows(types.rows * types.cols);
  if (w.position_embd)
    backend.read(positions.data(), w.position_embd.data, w.position_embd.bytes());
  backend.read(rows.data(), types.data, types.bytes());
  for (size_t i = 0; i < sums.size(); ++i) {
    const size_t type = i / positions.size(), column = i % types.cols;
    sums[i] = positions[i % positions.size()] + rows[type * types.cols + column];
  }
  const Tensor all = upload_floats(sums, backend, w.owned);
  w.position_embd = {all.data, DType::f32, n_types * n, types.cols};
}

// One allocation for copies of all tensors, so that small ones share huge pages.
std::byte* allocate_copies(Backend& backend, const std::vector<Tensor*>& tensors,
                           std::vector<Buffer>& owned) {
  Layout layout;
  for (const Tensor* tensor : tensors) {
    layout.place(static_cast<int64_t>(backend.upload_bytes(*tensor)));
  }
  owned.push_back(backend.allocate_whole(layout.size()));
  return owned.back().data();
}

// Whether experts, which are row ranges of one tensor, begin where a repacked copy can be divided.
bool divisible(const Config& c) {
  return c.mixture.n_experts == 0 || (c.mixture.n_ff % kRowGroup == 0 && c.n_embd % kRowGroup == 0);
}

// Throws FormatError for a model that the back end cannot compute.
void check_support(const GgufShards& model, const Config& c, const Weights& w,
                   const Backend& backend) {
  const Capabilities& has = backend.capabilities();
  const auto need = [&](bool supported, const auto&... what) {
    if (supported) return;
    throw FormatError(concat("[weights] ", model.path(), ": ", what..., ", which ", backend.name(),
                             " does not support; use device=cpu"));
  };
  const auto is_fused = [](const Layer& layer) { return bool{layer.mixture.gate_up.weight}; };
  need(has.divided_experts || std::ranges::none_of(w.layers, is_fused),
       "gate and up of the experts are one tensor (ffn_gate_up_exps)");
  need(has.state_spaces || c.state_space.n_taps == 0, "layers of a state-space model (Mamba-2)");
  need(has.shared_values || c.latent.rank == 0, "latent vectors instead of keys and values");
  need(has.whole_texts || !c.family->encoder, c.family->architecture, " is an encoder");
  const Family& f = *c.family;
  need(has.block_windows || !(f.block_windows || f.mixer_spread > 0 || f.scales_inputs),
       "architecture ", f.architecture);
  need(c.head_dim <= has.max_head_dim, "heads of ", c.head_dim, " dimensions");
  need(c.mixture.n_experts <= has.max_experts, c.mixture.n_experts, " experts");
}

}  // namespace

Weights load_weights(const GgufShards& model, const Config& c, Backend& backend,
                     size_t max_resident, const LoadProgress& progress) {
  Weights w = find_weights(model, c);
  check_support(model, c, w, backend);
  compute_weights(w, model, c, backend);
  const ModelTensors tensors = tensors_of(w, c);
  const std::vector<Tensor*> all = tensors.all();
  const bool mapped = backend.capabilities().mapped_weights;
  // Rows of this table are only looked up: where files are mapped, it stays in the file.
  const auto stays_in_file = [&](const Tensor* tensor) {
    return mapped && tensor == &w.layer_embd;
  };
  std::vector<Tensor*> uploaded = all;
  std::erase_if(uploaded, stays_in_file);
  bool in_place = mapped;
  if (max_resident > 0) {
    w.residency = make_residency(backend, tensors, max_resident);
  } else {
    in_place = (mapped && !divisible(c)) || !backend.expect_weights(bytes_of(backend, uploaded));
  }

  std::byte* const copies =
      mapped && !in_place ? allocate_copies(backend, uploaded, w.owned) : nullptr;
  Layout layout;  // of copies
  const auto stay = [&](const Tensor& host) {
    if (in_place) return backend.upload(host, nullptr);
    if (copies == nullptr) return backend.upload(host, w.owned);
    const auto bytes = static_cast<int64_t>(backend.upload_bytes(host));
    return backend.upload(host, bytes > 0 ? copies + layout.place(bytes) : nullptr);
  };
  const size_t total = bytes_of(uploaded);
  size_t loaded = 0;
  const auto finish = [&](Tensor& tensor, const Tensor& uploaded) {
    const std::span<const std::byte> host = tensor.memory();
    tensor = uploaded;
    if (tensor.data != host.data()) {
      MappedFile::release(host);  // not twice in memory
    } else if (max_resident == 0) {
      // Every weight is needed for the first token; afterwards memory use stays constant.
      MappedFile::populate(host);
    }
    loaded += host.size();
    if (progress) progress(loaded, total);
  };
  for (Tensor* tensor : tensors.others) {
    if (*tensor && !stays_in_file(tensor)) finish(*tensor, stay(*tensor));
  }
  for (int32_t l = 0; l < c.n_layers; ++l) {
    for (size_t i = 0; i < tensors.layers[l].size(); ++i) {
      Tensor& tensor = *tensors.layers[l][i];
      if (!tensor) continue;
      const auto placed = w.residency ? w.residency->place(l, i, tensor) : std::nullopt;
      finish(tensor, placed ? *placed : stay(tensor));
    }
  }
  if (!w.output.weight) w.output.weight = w.token_embd;
  if (w.token_types) add_token_types(w, backend);
  for (int32_t l = 0; c.unit_norms && l < c.n_layers; ++l) {
    if (c.rotates(l)) w.layers[l].attn_q_norm = w.layers[l].attn_k_norm = w.ones;
  }
  if (c.family->norm == NormKind::layer && !c.family->norm_bias) complete_norms(w, c, backend);
  return w;
}

Weights load_predictor(const GgufShards& model, const Config& c, const Weights& others,
                       Backend& backend) {
  Weights w = find_predictor(model, c);
  if (LatentLayer& latent = w.layers[0].latent; latent.kv_b) {
    divide_keys_and_values(latent, c, backend, w.owned);
  }
  std::vector<Tensor*> tensors = tensors_of(w.layers[0]);
  for (Affine* one : {&w.fusion.embd_norm, &w.fusion.hidden_norm, &w.fusion.projection,
                      &w.output_norm, &w.output}) {
    tensors.insert(tensors.end(), {&one->weight, &one->bias});
  }
  tensors.push_back(&w.token_embd);
  const bool in_place = backend.capabilities().mapped_weights && !divisible(c);
  for (Tensor* tensor : tensors) {
    if (!*tensor) continue;
    const std::span<const std::byte> host = tensor->memory();
    *tensor = in_place ? backend.upload(*tensor, nullptr) : backend.upload(*tensor, w.owned);
    if (tensor->data != host.data()) MappedFile::release(host);  // not twice in memory
  }
  if (!w.token_embd) w.token_embd = others.token_embd;
  if (!w.output.weight) w.output = others.output;
  if (!w.output_norm.weight) w.output_norm = others.output_norm;
  w.rope = others.rope;
  w.long_rope = others.long_rope;
  w.window_rope = others.window_rope;
  return w;
}

}  // namespace h2o
