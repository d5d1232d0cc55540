#include "model/weights.h"

#include <cmath>
#include <string>
#include <string_view>
#include <unordered_set>

#include "core/error.h"
#include "model/rope.h"

namespace h2o {
namespace {

// Finds tensors by name, and remembers which ones it was asked for.
class Loader {
 public:
  Loader(const GgufModel& model, const Config& config, Backend& backend, std::vector<Buffer>& owned,
         const LoadProgress& progress)
      : model_(model), config_(config), backend_(backend), owned_(owned), progress_(progress) {
    for (const GgufFile& file : model.files()) {
      for (const GgufTensor& tensor : file.tensors()) total_ += tensor.data.size();
    }
    backend.expect_weights(total_);
  }

  // A matrix in any type that h2o computes on; empty if it is missing.
  Tensor matrix_or_none(const std::string& name, int64_t rows, int64_t cols) {
    const Tensor host = find(name, rows, cols);
    return upload(host);
  }

  Tensor matrix(const std::string& name, int64_t rows, int64_t cols) {
    return present(name, matrix_or_none(name, rows, cols));
  }

  // A tensor that the format keeps in f32: norms, biases, learned positions.
  Tensor floats_or_none(const std::string& name, int64_t rows, int64_t cols) {
    return upload(host_floats(name, rows, cols));
  }

  Tensor floats(const std::string& name, int64_t rows, int64_t cols) {
    return present(name, floats_or_none(name, rows, cols));
  }

  // The same, left in the host's memory; empty if it is missing.
  Tensor host_floats(const std::string& name, int64_t rows, int64_t cols) {
    const Tensor host = find(name, rows, cols);
    if (host && host.dtype != DType::f32) {
      fail(name, text("has type ", info(host.dtype).name, ", expected F32"));
    }
    return host;
  }

  Affine linear(const std::string& name, int64_t out, int64_t in, bool needs_bias) {
    const Tensor weight = matrix(name + ".weight", out, in);
    const Tensor bias = floats_or_none(name + ".bias", 1, out);
    return {weight, needs_bias ? present(name + ".bias", bias) : bias};
  }

  Affine norm(const std::string& name) {
    const Tensor weight = floats(name + ".weight", 1, config_.n_embd);
    if (config_.family->norm == NormKind::rms) return {weight, {}};
    return {weight, floats(name + ".bias", 1, config_.n_embd)};
  }

  bool has(const std::string& name) const { return static_cast<bool>(model_.tensor(name)); }

  // A tensor nobody asked for would be left out of the computation without a word.
  void expect_all_used() const {
    for (const GgufFile& file : model_.files()) {
      for (const GgufTensor& tensor : file.tensors()) {
        // Old converters saved the inverse frequencies, which follow from the metadata.
        if (tensor.name.ends_with("attn_rot_embd.weight")) continue;
        if (!used_.contains(std::string(tensor.name))) {
          fail(quoted(tensor.name), text("is not part of a '", config_.family->architecture,
                                         "' model as h2o computes it"));
        }
      }
    }
  }

 private:
  Tensor upload(const Tensor& host) {
    if (!host) return host;
    const Tensor tensor = backend_.upload(host, owned_);
    loaded_ += static_cast<size_t>(host.bytes());
    if (progress_) progress_(loaded_, total_);
    return tensor;
  }

  Tensor find(const std::string& name, int64_t rows, int64_t cols) {
    const Tensor tensor = model_.tensor(name);
    if (tensor && (tensor.rows != rows || tensor.cols != cols)) {
      fail(name, text("has shape [", tensor.rows, ", ", tensor.cols, "], expected [", rows, ", ",
                      cols, "]"));
    }
    if (tensor) used_.insert(name);
    return tensor;
  }

  Tensor present(const std::string& name, const Tensor& tensor) const {
    if (!tensor) fail(name, "is missing");
    return tensor;
  }

  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    throw FormatError(text("[weights] ", model_.path(), ": tensor ", name, " ", what));
  }

  const GgufModel& model_;
  const Config& config_;
  Backend& backend_;
  std::vector<Buffer>& owned_;
  const LoadProgress& progress_;
  size_t loaded_ = 0;  // bytes
  size_t total_ = 0;
  std::unordered_set<std::string> used_;
};

// The rows [begin, end) of a matrix and of its bias.
Affine slice(const Affine& whole, int64_t begin, int64_t end) {
  const auto rows = [&](const Tensor& t) {
    return Tensor{t.row(begin), t.dtype, end - begin, t.cols};
  };
  if (!whole.bias) return {rows(whole.weight), {}};
  return {rows(whole.weight),
          {reinterpret_cast<std::byte*>(whole.bias.floats() + begin), DType::f32, 1, end - begin}};
}

Layer load_layer(Loader& load, const Config& c, const std::string& blk) {
  const int64_t q_width = int64_t{c.n_heads} * c.head_dim;
  const int64_t kv_width = int64_t{c.n_kv_heads} * c.head_dim;
  const bool qkv_biases = c.family->biases != Biases::optional;
  const bool biases = c.family->biases == Biases::all;

  Layer layer;
  layer.attn_norm = load.norm(blk + "attn_norm");
  if (load.has(blk + "attn_qkv.weight")) {
    const Affine qkv = load.linear(blk + "attn_qkv", q_width + 2 * kv_width, c.n_embd, qkv_biases);
    layer.attn_q = slice(qkv, 0, q_width);
    layer.attn_k = slice(qkv, q_width, q_width + kv_width);
    layer.attn_v = slice(qkv, q_width + kv_width, q_width + 2 * kv_width);
  } else {
    layer.attn_q = load.linear(blk + "attn_q", q_width, c.n_embd, qkv_biases);
    layer.attn_k = load.linear(blk + "attn_k", kv_width, c.n_embd, qkv_biases);
    layer.attn_v = load.linear(blk + "attn_v", kv_width, c.n_embd, qkv_biases);
  }
  if (c.family->qk_norm) {
    layer.attn_q_norm = load.floats(blk + "attn_q_norm.weight", 1, c.head_dim);
    layer.attn_k_norm = load.floats(blk + "attn_k_norm.weight", 1, c.head_dim);
  }
  layer.attn_output = load.linear(blk + "attn_output", c.n_embd, q_width, biases);
  layer.ffn_norm = load.norm(blk + "ffn_norm");
  if (c.family->activation == Activation::swiglu) {
    layer.ffn_gate = load.linear(blk + "ffn_gate", c.n_ff, c.n_embd, biases);
  }
  layer.ffn_up = load.linear(blk + "ffn_up", c.n_ff, c.n_embd, biases);
  layer.ffn_down = load.linear(blk + "ffn_down", c.n_embd, c.n_ff, biases);
  return layer;
}

}  // namespace

Weights load_weights(const GgufModel& model, const Config& c, Backend& backend,
                     const LoadProgress& progress) {
  Weights w;
  Loader load(model, c, backend, w.owned, progress);
  w.token_embd = load.matrix("token_embd.weight", c.n_vocab, c.n_embd);
  if (c.family->rope == RopeLayout::none) {
    w.position_embd = load.floats("position_embd.weight", c.n_ctx_train, c.n_embd);
  } else {
    const Tensor divisors = load.host_floats("rope_freqs.weight", 1, c.rope.n_rot / 2);
    const std::vector<float> frequencies = rope_frequencies(c.rope, divisors);
    for (float frequency : frequencies) {
      // Metadata and divisors may each be in range, and what follows from them not.
      if (!std::isfinite(frequency * c.rope.magnitude)) {
        throw FormatError(text("[weights] ", model.path(), ": rotary frequency ", frequency,
                               " and magnitude ", c.rope.magnitude, ", expected finite numbers"));
      }
    }
    const Tensor host{nullptr, DType::f32, 1, c.rope.n_rot / 2};
    w.owned.push_back(backend.allocate(static_cast<size_t>(host.bytes())));
    backend.write(w.owned.back().data(), frequencies.data(), w.owned.back().size());
    w.rope = {c.family->rope,
              {w.owned.back().data(), host.dtype, host.rows, host.cols},
              c.rope.magnitude};
  }
  for (int32_t l = 0; l < c.n_layers; ++l) {
    w.layers.push_back(load_layer(load, c, text("blk.", l, ".")));
  }
  w.output_norm = load.norm("output_norm");
  w.output.weight = load.matrix_or_none("output.weight", c.n_vocab, c.n_embd);
  if (!w.output.weight) w.output.weight = w.token_embd;
  load.expect_all_used();
  return w;
}

}  // namespace h2o
