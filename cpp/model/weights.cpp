#include "model/weights.h"

#include "core/error.h"

namespace h2o {
namespace {

class Loader {
 public:
  Loader(const GgufFile& file, Backend& backend, std::vector<Buffer>& owned)
      : file_(file), backend_(backend), owned_(owned) {}

  // A matrix in any type that h2o computes on.
  Tensor matrix(const std::string& name, int64_t rows, int64_t cols) {
    const GgufTensor* tensor = file_.find_tensor(name);
    if (tensor == nullptr) fail(name, "is missing");
    const Tensor view = file_.view(*tensor);
    if (view.rows != rows || view.cols != cols) {
      fail(name,
           text("has shape [", view.rows, ", ", view.cols, "], expected [", rows, ", ", cols, "]"));
    }
    return backend_.upload(view, owned_);
  }

  // A tensor that the format keeps in f32: norms, biases, learned positions.
  Tensor floats(const std::string& name, int64_t rows, int64_t cols) {
    const Tensor tensor = matrix(name, rows, cols);
    if (tensor.dtype != DType::f32) {
      fail(name, text("has type ", info(tensor.dtype).name, ", expected F32"));
    }
    return tensor;
  }

  Affine linear(const std::string& name, int64_t out, int64_t in) {
    return {matrix(name + ".weight", out, in), floats(name + ".bias", 1, out)};
  }

  Affine norm(const std::string& name, int64_t n) {
    return {floats(name + ".weight", 1, n), floats(name + ".bias", 1, n)};
  }

 private:
  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    throw FormatError(text("[weights] ", file_.path(), ": tensor ", name, " ", what));
  }

  const GgufFile& file_;
  Backend& backend_;
  std::vector<Buffer>& owned_;
};

}  // namespace

Weights load_weights(const GgufFile& file, const Config& c, Backend& backend) {
  Weights w;
  Loader load(file, backend, w.owned);
  w.token_embd = load.matrix("token_embd.weight", c.n_vocab, c.n_embd);
  w.position_embd = load.floats("position_embd.weight", c.n_ctx_train, c.n_embd);

  const int64_t q_width = int64_t{c.n_heads} * c.head_dim;
  const int64_t kv_width = int64_t{c.n_kv_heads} * c.head_dim;
  for (int32_t l = 0; l < c.n_layers; ++l) {
    const std::string blk = text("blk.", l, ".");
    w.layers.push_back({
        .attn_norm = load.norm(blk + "attn_norm", c.n_embd),
        .attn_q = load.linear(blk + "attn_q", q_width, c.n_embd),
        .attn_k = load.linear(blk + "attn_k", kv_width, c.n_embd),
        .attn_v = load.linear(blk + "attn_v", kv_width, c.n_embd),
        .attn_output = load.linear(blk + "attn_output", c.n_embd, q_width),
        .ffn_norm = load.norm(blk + "ffn_norm", c.n_embd),
        .ffn_up = load.linear(blk + "ffn_up", c.n_ff, c.n_embd),
        .ffn_down = load.linear(blk + "ffn_down", c.n_embd, c.n_ff),
    });
  }
  w.output_norm = load.norm("output_norm", c.n_embd);
  w.output.weight = file.find_tensor("output.weight") != nullptr
                        ? load.matrix("output.weight", c.n_vocab, c.n_embd)
                        : w.token_embd;
  return w;
}

}  // namespace h2o
