#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>

#include "core/error.h"
#include "core/layout.h"
#include "io/mapped_file.h"
#include "model/copied_layer_offload.h"
#include "model/find_weights.h"
#include "model/mapped_layer_offload.h"
#include "model/rope.h"

namespace h2o {
namespace {

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
  DeltaNetLayer& d = layer.delta;
  ShortConvLayer& s = layer.short_conv;
  for (Affine* one :
       {&d.qkv, &d.gate, &d.alpha, &d.beta, &d.beta_alpha, &d.output, &s.input, &s.output}) {
    all.insert(all.end(), {&one->weight, &one->bias});
  }
  all.insert(all.end(), {&d.a, &d.dt_bias, &d.norm});
  all.insert(all.end(),
             {&m.selection_bias, &layer.attn_q_norm, &layer.attn_k_norm, &layer.attn_sinks});
  return all;
}

// Of a mixture: the matrices of all experts of each layer, which may be offloaded, and the rest.
struct ExpertSplit {
  std::vector<LayerTensors> experts;
  std::vector<Tensor*> dense;
};

ExpertSplit split_experts(std::vector<Layer>& layers, const std::vector<LayerTensors>& tensors,
                          const std::vector<Tensor*>& others) {
  ExpertSplit split{.experts = {}, .dense = others};
  for (size_t l = 0; l < layers.size(); ++l) {
    Mixture& m = layers[l].mixture;
    split.experts.push_back({&m.gate.weight, &m.up.weight, &m.down.weight});
    std::ranges::copy_if(tensors[l], std::back_inserter(split.dense), [&](const Tensor* tensor) {
      return std::ranges::find(split.experts.back(), tensor) == split.experts.back().end();
    });
  }
  return split;
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

Tensor upload_transposed(const Tensor& matrix, Backend& backend, std::vector<Buffer>& owned) {
  std::vector<float> values(matrix.rows * matrix.cols);
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t j = 0; j < matrix.cols; ++j) {
      values[j * matrix.rows + i] = matrix.floats()[i * matrix.cols + j];
    }
  }
  return {upload_floats(values, backend, owned).data, DType::f32, matrix.cols, matrix.rows};
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
  for (Layer& layer : w.layers) {
    for (Tensor* conv : {&layer.delta.conv, &layer.short_conv.conv}) {
      if (*conv) *conv = upload_transposed(*conv, backend, w.owned);
    }
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
    const std::span<const std::byte> host = tensor.memory();
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
