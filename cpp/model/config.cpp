#include "model/config.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/error.h"

namespace h2o {
namespace {

constexpr std::array<std::string_view, 1> kArchitectures = {"opt"};

std::string architecture(const GgufFile& file) {
  const std::string_view name = file.string("general.architecture");
  if (std::find(kArchitectures.begin(), kArchitectures.end(), name) != kArchitectures.end()) {
    return std::string(name);
  }
  std::string known;
  for (std::string_view a : kArchitectures) known += text(known.empty() ? "" : ", ", a);
  throw FormatError(text("[model] ", file.path(), ": architecture '", name,
                         "' is not supported; supported: ", known));
}

// A count between 1 and 2^24: more than any model has, and small enough that products of two fit.
int32_t positive(const GgufFile& file, const std::string& key, int64_t value) {
  constexpr int64_t kMost = int64_t{1} << 24;
  if (value < 1 || value > kMost) {
    throw FormatError(
        text("[model] ", file.path(), ": ", key, " is ", value, ", expected 1 to ", kMost));
  }
  return static_cast<int32_t>(value);
}

}  // namespace

Config read_config(const GgufFile& file) {
  Config c;
  c.architecture = architecture(file);
  const auto key = [&](const char* suffix) { return text(c.architecture, ".", suffix); };
  const auto count = [&](const char* suffix) {
    return positive(file, key(suffix), file.integer(key(suffix)));
  };
  c.n_ctx_train = count("context_length");
  c.n_embd = count("embedding_length");
  c.n_layers = count("block_count");
  c.n_ff = count("feed_forward_length");
  c.n_heads = count("attention.head_count");
  const std::string kv_key = key("attention.head_count_kv");
  c.n_kv_heads = positive(file, kv_key, file.integer_or(kv_key, c.n_heads));
  c.norm_eps = static_cast<float>(file.number(key("attention.layer_norm_epsilon")));

  if (c.n_embd % c.n_heads != 0 || c.n_heads % c.n_kv_heads != 0) {
    throw FormatError(text("[model] ", file.path(), ": embedding length ", c.n_embd,
                           " over head_count ", c.n_heads, " over head_count_kv ", c.n_kv_heads,
                           " does not divide evenly"));
  }
  if (!(c.norm_eps > 0 && c.norm_eps < 1)) {
    throw FormatError(text("[model] ", file.path(), ": ", key("attention.layer_norm_epsilon"),
                           " is ", c.norm_eps, ", expected between 0 and 1"));
  }
  c.head_dim = c.n_embd / c.n_heads;

  const GgufTensor* table = file.find_tensor("token_embd.weight");
  if (table == nullptr) {
    throw FormatError(text("[model] ", file.path(), ": tensor token_embd.weight is missing"));
  }
  c.n_vocab = positive(file, "rows of token_embd.weight", table->dims[1]);
  return c;
}

}  // namespace h2o
