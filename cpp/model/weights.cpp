#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>

#include "core/error.h"
#include "core/layout.h"
#include "io/mapped_file.h"
#include "model/copied_layer_offload.h"
#include "model/expert_split.h"
#include "model/mapped_layer_offload.h"
#include "model/rope.h"

namespace h2o {
namespace {

// Looks up tensors by name and records which ones were used.
class Finder {
 public:
  Finder(const GgufShards& model, const Config& config) : model_(model), config_(config) {}

  // One matrix, or n matrices of the same shape, in any supported type; empty if missing.
  Tensor matrix_or_none(const std::string& name, int64_t rows, int64_t cols, int64_t n = 1) {
    const Tensor tensor = model_.tensor(name, n);
    rows *= n;
    if (tensor && (tensor.rows != rows || tensor.cols != cols)) {
      fail(name, text("has shape [", tensor.rows, ", ", tensor.cols, "], expected [", rows, ", ",
                      cols, "]"));
    }
    if (tensor) used_.insert(name);
    return tensor;
  }

  Tensor matrix(const std::string& name, int64_t rows, int64_t cols) {
    return present(name, matrix_or_none(name, rows, cols));
  }

  // A tensor that GGUF stores in f32: norms, biases, learned positions.
  Tensor floats_or_none(const std::string& name, int64_t rows, int64_t cols) {
    const Tensor tensor = matrix_or_none(name, rows, cols);
    if (tensor && tensor.dtype != DType::f32) {
      fail(name, text("has type ", info(tensor.dtype).name, ", expected F32"));
    }
    return tensor;
  }

  Tensor floats(const std::string& name, int64_t rows, int64_t cols) {
    return present(name, floats_or_none(name, rows, cols));
  }

  // All experts' matrices, stacked vertically; shape [n, rows, cols] in the file.
  Affine experts(const std::string& name, int64_t n, int64_t out, int64_t in, bool needs_bias) {
    const Tensor weight = present(name + ".weight", matrix_or_none(name + ".weight", out, in, n));
    const Tensor bias = floats_or_none(name + ".bias", n, out);
    return {weight, needs_bias ? present(name + ".bias", bias) : bias};
  }

  Affine linear(const std::string& name, int64_t out, int64_t in, bool needs_bias) {
    const Tensor weight = matrix(name + ".weight", out, in);
    const Tensor bias = floats_or_none(name + ".bias", 1, out);
    return {weight, needs_bias ? present(name + ".bias", bias) : bias};
  }

  Affine norm(const std::string& name) {
    const Tensor weight = floats(name + ".weight", 1, config_.n_embd);
    if (!has_bias()) return {weight, {}};
    return {weight, floats(name + ".bias", 1, config_.n_embd)};
  }

  bool has_bias() const {
    return config_.family->norm == NormKind::layer && config_.family->norm_bias;
  }

  bool has(const std::string& name) const { return static_cast<bool>(model_.tensor(name)); }

  // An unused tensor would silently change the result.
  void expect_all_used() const {
    for (const GgufFile& file : model_.files()) {
      for (const GgufTensor& tensor : file.tensors()) {
        // Old converters saved the inverse frequencies, which are derived from the metadata here.
        if (tensor.name.ends_with("attn_rot_embd.weight")) continue;
        if (!used_.contains(std::string(tensor.name))) {
          fail(quoted(tensor.name),
               text("is not part of a '", config_.family->architecture, "' model"));
        }
      }
    }
  }

 private:
  Tensor present(const std::string& name, const Tensor& tensor) const {
    if (!tensor) fail(name, "is missing");
    return tensor;
  }

  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    throw FormatError(text("[weights] ", model_.path(), ": tensor ", name, " ", what));
  }

  const GgufShards& model_;
  const Config& config_;
  std::unordered_set<std::string> used_;
};

// Rows [begin, end) of a matrix and of its bias.
Affine slice(const Affine& whole, int64_t begin, int64_t end) {
  const auto rows = [&](const Tensor& t) {
    return Tensor{t.row(begin), t.dtype, end - begin, t.cols};
  };
  if (!whole.bias) return {rows(whole.weight), {}};
  return {rows(whole.weight),
          {reinterpret_cast<std::byte*>(whole.bias.floats() + begin), DType::f32, 1, end - begin}};
}

Mixture find_mixture(Finder& find, const Config& c, const std::string& blk) {
  const MixtureConfig& m = c.mixture;
  const bool biases = c.family->biases == Biases::all;
  Mixture mixture;
  mixture.router = find.linear(blk + "ffn_gate_inp", m.n_experts, c.n_embd, biases);
  mixture.gate = find.experts(blk + "ffn_gate_exps", m.n_experts, m.n_ff, c.n_embd, biases);
  mixture.up = find.experts(blk + "ffn_up_exps", m.n_experts, m.n_ff, c.n_embd, biases);
  mixture.down = find.experts(blk + "ffn_down_exps", m.n_experts, c.n_embd, m.n_ff, biases);
  if (m.n_ff_shared > 0) {
    mixture.shared_router.weight =
        find.matrix_or_none(blk + "ffn_gate_inp_shexp.weight", 1, c.n_embd);
    mixture.shared_gate = find.linear(blk + "ffn_gate_shexp", m.n_ff_shared, c.n_embd, false);
    mixture.shared_up = find.linear(blk + "ffn_up_shexp", m.n_ff_shared, c.n_embd, false);
    mixture.shared_down = find.linear(blk + "ffn_down_shexp", c.n_embd, m.n_ff_shared, false);
  }
  return mixture;
}

Layer find_layer(Finder& find, const Config& c, const std::string& blk) {
  const int64_t q_width = int64_t{c.n_heads} * c.head_dim;
  const int64_t kv_width = int64_t{c.n_kv_heads} * c.head_dim;
  const bool qkv_biases = c.family->biases != Biases::optional;
  const bool biases = c.family->biases == Biases::all;

  Layer layer;
  // Falcon 40B has two parallel norms; the second is attention's.
  const bool two_norms = c.family->shared_norm && find.has(blk + "attn_norm_2.weight");
  layer.attn_norm = find.norm(blk + (two_norms ? "attn_norm_2" : "attn_norm"));
  if (two_norms) layer.ffn_norm = find.norm(blk + "attn_norm");
  if (find.has(blk + "attn_qkv.weight")) {
    const Affine qkv = find.linear(blk + "attn_qkv", q_width + 2 * kv_width, c.n_embd, qkv_biases);
    layer.attn_q = slice(qkv, 0, q_width);
    layer.attn_k = slice(qkv, q_width, q_width + kv_width);
    layer.attn_v = slice(qkv, q_width + kv_width, q_width + 2 * kv_width);
  } else {
    layer.attn_q = find.linear(blk + "attn_q", q_width, c.n_embd, qkv_biases);
    layer.attn_k = find.linear(blk + "attn_k", kv_width, c.n_embd, qkv_biases);
    layer.attn_v = find.linear(blk + "attn_v", kv_width, c.n_embd, qkv_biases);
  }
  if (c.family->qk_norm != QkNorm::none) {
    const bool whole = c.family->qk_norm == QkNorm::whole;
    layer.attn_q_norm = find.floats(blk + "attn_q_norm.weight", 1, whole ? q_width : c.head_dim);
    layer.attn_k_norm = find.floats(blk + "attn_k_norm.weight", 1, whole ? kv_width : c.head_dim);
  }
  if (c.family->attn_sinks) {
    layer.attn_sinks = find.floats(blk + "attn_sinks.weight", 1, c.n_heads);
  }
  layer.attn_output = find.linear(blk + "attn_output", c.n_embd, q_width, biases);
  const bool shared_norm = c.parallel_residual && c.family->shared_norm;
  if (!shared_norm && !two_norms) layer.ffn_norm = find.norm(blk + std::string(c.family->ffn_norm));
  if (c.family->post_norms) {
    layer.attn_post_norm = find.norm(blk + "post_attention_norm");
    layer.ffn_post_norm = find.norm(blk + "post_ffw_norm");
  }
  if (c.mixture.n_experts > 0) {
    layer.mixture = find_mixture(find, c, blk);
    return layer;
  }
  const bool gated = c.family->activation == Activation::gated;
  if (gated && !find.has(blk + "ffn_gate.weight")) {
    const Affine both = find.linear(blk + "ffn_up", int64_t{2} * c.n_ff, c.n_embd, biases);
    layer.ffn_gate = slice(both, 0, c.n_ff);
    layer.ffn_up = slice(both, c.n_ff, int64_t{2} * c.n_ff);
  } else {
    if (gated) layer.ffn_gate = find.linear(blk + "ffn_gate", c.n_ff, c.n_embd, biases);
    layer.ffn_up = find.linear(blk + "ffn_up", c.n_ff, c.n_embd, biases);
  }
  layer.ffn_down = find.linear(blk + "ffn_down", c.n_embd, c.n_ff, biases);
  return layer;
}

// The weights as views of the file; of the rotary frequencies only the divisors.
Weights find_weights(const GgufShards& model, const Config& c) {
  Weights w;
  Finder find(model, c);
  w.token_embd = find.matrix("token_embd.weight", c.n_vocab, c.n_embd);
  if (c.family->embedding_norm) w.token_norm = find.norm("token_embd_norm");
  if (c.family->rope != RopeLayout::none) {
    const auto divisors = [&](const char* name) {
      return find.floats_or_none(name, 1, c.rope.n_rot / 2);
    };
    w.rope = {c.family->rope, divisors("rope_freqs.weight"), c.rope.magnitude};
    if (find.has("rope_factors_long.weight")) {
      w.long_rope = {c.family->rope, divisors("rope_factors_long.weight"), c.rope.magnitude};
      w.rope.frequencies = find.floats("rope_factors_short.weight", 1, c.rope.n_rot / 2);
    }
  } else if (c.alibi_max_bias == 0) {
    w.position_embd = find.floats("position_embd.weight", c.n_ctx_train, c.n_embd);
  }
  for (int32_t l = 0; l < c.n_layers; ++l) {
    w.layers.push_back(find_layer(find, c, text("blk.", l, ".")));
  }
  w.output_norm = find.norm("output_norm");
  w.output = {find.matrix_or_none("output.weight", c.n_vocab, c.n_embd),
              find.floats_or_none("output.bias", 1, c.n_vocab)};
  find.expect_all_used();
  return w;
}

LayerTensors tensors_of(Layer& layer) {
  LayerTensors all;
  for (Affine* one : {&layer.attn_norm, &layer.attn_post_norm, &layer.ffn_post_norm, &layer.attn_q,
                      &layer.attn_k, &layer.attn_v, &layer.attn_output, &layer.ffn_norm,
                      &layer.ffn_gate, &layer.ffn_up, &layer.ffn_down}) {
    all.insert(all.end(), {&one->weight, &one->bias});
  }
  Mixture& m = layer.mixture;
  for (Affine* one : {&m.router, &m.gate, &m.up, &m.down, &m.shared_router, &m.shared_gate,
                      &m.shared_up, &m.shared_down}) {
    all.insert(all.end(), {&one->weight, &one->bias});
  }
  all.insert(all.end(), {&layer.attn_q_norm, &layer.attn_k_norm, &layer.attn_sinks});
  return all;
}

size_t bytes_of(const std::vector<Tensor*>& tensors) {
  size_t n = 0;
  for (const Tensor* tensor : tensors) n += static_cast<size_t>(tensor->bytes());
  return n;
}

size_t bytes_of(const Backend& backend, const std::vector<Tensor*>& tensors) {
  size_t n = 0;
  for (const Tensor* tensor : tensors) n += backend.upload_bytes(*tensor);
  return n;
}

// Returns nullptr if there are no experts, or if offloading whole layers is enough.
std::unique_ptr<ExpertOffload> offload_experts(std::vector<Layer>& layers,
                                               const std::vector<LayerTensors>& tensors,
                                               const std::vector<Tensor*>& others, const Config& c,
                                               size_t max_resident) {
  if (c.mixture.n_experts == 0) return nullptr;
  const auto [experts, dense] = split_experts(layers, tensors, others);
  size_t largest = 0;
  for (const LayerTensors& layer : tensors) largest = std::max(largest, bytes_of(layer));
  const size_t least = ExpertOffload::least(experts, dense);
  if (max_resident < least && bytes_of(others) + 2 * largest < least) return nullptr;
  return std::make_unique<ExpertOffload>(experts, c.mixture.n_experts, dense, max_resident);
}

// The same for a back end that copies weights.
std::unique_ptr<HostExperts> keep_experts(Backend& backend, std::vector<Layer>& layers,
                                          const std::vector<LayerTensors>& tensors,
                                          const std::vector<Tensor*>& others, const Config& c,
                                          size_t max_resident) {
  if (c.mixture.n_experts == 0) return nullptr;
  const auto [experts, dense] = split_experts(layers, tensors, others);
  size_t largest = 0;
  for (const LayerTensors& layer : tensors) largest = std::max(largest, bytes_of(backend, layer));
  const size_t least = bytes_of(backend, dense);
  if (max_resident < least && bytes_of(backend, others) + 2 * largest < least) return nullptr;
  return std::make_unique<HostExperts>(backend, experts, least, max_resident);
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
      throw FormatError(text("[weights] ", model.path(), ": rotary frequency ", frequency,
                             " and magnitude ", rope.magnitude, ", expected finite numbers"));
    }
  }
  return upload_floats(frequencies, backend, owned);
}

}  // namespace

Weights load_weights(const GgufShards& model, const Config& c, Backend& backend,
                     size_t max_resident, const LoadProgress& progress) {
  Weights w = find_weights(model, c);
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
  Tensor no_bias;
  if (c.family->norm == NormKind::layer && !c.family->norm_bias) {
    w.owned.push_back(backend.allocate(sizeof(float) * c.n_embd));
    no_bias = {w.owned.back().data(), DType::f32, 1, c.n_embd};
  }
  std::vector<LayerTensors> layers;
  for (Layer& layer : w.layers) layers.push_back(tensors_of(layer));
  const std::vector<Tensor*> others = {
      &w.token_embd,         &w.position_embd,    &w.token_norm.weight, &w.token_norm.bias,
      &w.output_norm.weight, &w.output_norm.bias, &w.output.weight,     &w.output.bias};

  const size_t of_others = bytes_of(backend, others);
  size_t total = bytes_of(others), on_backend = of_others;  // bytes in the file; on the back end
  for (const LayerTensors& layer : layers) {
    total += bytes_of(layer);
    on_backend += bytes_of(backend, layer);
  }
  CopiedLayerOffload* copied = nullptr;
  bool in_place = false;
  if (max_resident == 0) {
    // Experts are row ranges of one tensor.
    const bool divisible = c.mixture.n_ff % kRowGroup == 0 && c.n_embd % kRowGroup == 0;
    in_place = (c.mixture.n_experts > 0 && !divisible && backend.maps_weights()) ||
               !backend.expect_weights(on_backend);
  } else if (backend.maps_weights()) {
    w.experts = offload_experts(w.layers, layers, others, c, max_resident);
    if (!w.experts) w.stream = std::make_unique<MappedLayerOffload>(layers, others, max_resident);
    in_place = true;
  } else {
    w.host_experts = keep_experts(backend, w.layers, layers, others, c, max_resident);
    if (!w.host_experts) {
      auto stream = std::make_unique<CopiedLayerOffload>(backend, layers, of_others, max_resident);
      copied = stream.get();
      w.stream = std::move(stream);
    }
  }

  size_t loaded = 0;
  const auto upload = [&](Tensor& tensor, const auto& to) {
    if (!tensor) return;
    const std::span<const std::byte> host(tensor.data, static_cast<size_t>(tensor.bytes()));
    tensor = to(tensor);
    if (tensor.data != host.data()) {
      MappedFile::release(host);  // not twice in memory
    } else if (max_resident == 0) {
      // Every weight is needed for the first token; afterwards memory use stays constant.
      MappedFile::populate(host);
    }
    loaded += host.size();
    if (progress) progress(loaded, total);
  };
  // On the CPU all copies are in one allocation, so that small tensors share huge pages.
  Layout layout;
  const auto place = [&](const Tensor* tensor) {
    return layout.place(static_cast<int64_t>(backend.upload_bytes(*tensor)));
  };
  std::byte* copies = nullptr;
  if (max_resident == 0 && !in_place && backend.maps_weights()) {
    std::ranges::for_each(others, place);
    for (const LayerTensors& layer : layers) std::ranges::for_each(layer, place);
    w.owned.push_back(backend.allocate_whole(layout.size()));
    copies = w.owned.back().data();
    layout = {};
  }
  const auto to_stay = [&](const Tensor& host) {
    if (in_place) return backend.upload(host, nullptr);
    if (copies == nullptr) return backend.upload(host, w.owned);
    return backend.upload(host, backend.upload_bytes(host) > 0 ? copies + place(&host) : nullptr);
  };
  for (Tensor* tensor : others) upload(*tensor, to_stay);
  for (int32_t l = 0; l < c.n_layers; ++l) {
    for (size_t i = 0; i < layers[l].size(); ++i) {
      if (copied != nullptr && copied->streams(l)) {
        upload(*layers[l][i], [&](const Tensor& host) { return copied->upload(l, i, host); });
      } else if (w.host_experts && w.host_experts->has(l, layers[l][i])) {
        upload(*layers[l][i], [&](const Tensor& host) { return w.host_experts->upload(host); });
      } else {
        upload(*layers[l][i], to_stay);
      }
    }
  }
  if (!w.output.weight) w.output.weight = w.token_embd;
  if (no_bias) {
    w.output_norm.bias = no_bias;
    for (Layer& layer : w.layers) {
      layer.attn_norm.bias = no_bias;
      if (layer.ffn_norm.weight) layer.ffn_norm.bias = no_bias;
    }
  }
  return w;
}

}  // namespace h2o
