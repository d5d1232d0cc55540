// ConfigKeys: the hyperparameters of a GGUF file by key, and whether each of them was read.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "core/error.h"
#include "io/gguf_shards.h"
#include "model/family.h"

namespace h2o {

// Keys that do not affect the computation of text, are implied by tensors, or only apply to one
// rope.scaling.type.
inline constexpr std::string_view kInformative[] = {
    "vocab_size",
    "tensor_data_layout",
    "pooling_type",
    "dense_2_feat_in",  // of dense_2.weight, and so on
    "dense_2_feat_out",
    "dense_3_feat_in",
    "dense_3_feat_out",
    "classifier.output_labels",  // names of the rows of cls.output
    "rope.scaling.finetuned",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.dimension_sections",  // of M-RoPE, whose axes are all the same for text
    "n_deepstack_layers",       // for images
    // Ollama's, in models with an encoder inside
    "rope.mrope_section",
    "image_token_index",
    "spatial_merge_size",
};
// Beginnings of keys of encoders.
inline constexpr std::string_view kOfEncoders[] = {"vision.", "audio.", "mm."};

// Ollama's names of keys, and llama.cpp's.
struct OtherName {
  std::string_view name, of;
};
inline constexpr OtherName kOtherNames[] = {
    {"rope.global.freq_base", "rope.freq_base"},
    {"rope.local.freq_base", "rope.freq_base_swa"},
    {"rope.scaling.beta_fast", "rope.scaling.yarn_beta_fast"},
    {"rope.scaling.beta_slow", "rope.scaling.yarn_beta_slow"},
    {"rope.scaling.extrapolation_factor", "rope.scaling.yarn_ext_factor"},
    {"rope.scaling.mscale_all_dim", "rope.scaling.yarn_log_multiplier"},
    {"rope.scaling_beta", "attention.temperature_scale"},
};

// Keys that change the computation in unsupported ways, with the value that disables them.
struct Neutral {
  const char* key;
  double value;
};
inline constexpr Neutral kNeutral[] = {
    {"attention.causal", 1},
    {"attention.clamp_kqv", 0},
    {"attention.max_alibi_bias", 0},
    {"attn_logit_softcapping", 0},
    {"embedding_scale", 1},
    {"expert_count", 0},
    {"expert_used_count", 0},
    {"expert_shared_count", 0},
    {"expert_group_count", 0},
    {"expert_group_used_count", 0},
    {"leading_dense_block_count", 0},
    {"final_logit_softcapping", 0},
    {"logit_scale", 1},
    {"residual_scale", 1},
};

// The metadata of one architecture, by key without prefix. Records which keys were used.
class ConfigKeys {
 public:
  explicit ConfigKeys(const GgufFile& file)
      : file_(file), architecture_(file.string("general.architecture")) {
    for (const std::string_view key : kInformative) used_.insert(full(key));
  }

  const Family& family() const {
    try {
      return find_family(architecture_);
    } catch (const FormatError& error) {
      fail(error.what());
    }
  }

  // A count between 1 and 2^24: more than any model has, and small enough for products of two. May
  // be an array of one count for every layer, which must be equal.
  int32_t count(const char* key) {
    return in_range(key, is_array(key) ? same_in_layers(key) : file_.integer(use(key)));
  }
  // One for every layer, which may differ.
  std::vector<int32_t> counts(const char* key, int32_t n_layers) {
    if (!is_array(key)) return std::vector<int32_t>(n_layers, count(key));
    const std::vector<int64_t> values = integers(key);
    if (std::ssize(values) != n_layers) {
      fail(full(key), " has ", values.size(), " counts, expected ", n_layers);
    }
    std::vector<int32_t> counts;
    for (const int64_t value : values) counts.push_back(in_range(key, value));
    return counts;
  }
  int32_t count_or(const char* key, int32_t fallback) {
    return has(key) ? count(key) : in_range(key, fallback);
  }

  float positive(const char* key) { return checked(key, file_.number(use(key))); }
  float positive_or(const char* key, double fallback) {
    return checked(key, file_.number_or(use(key), fallback));
  }

  // A non-negative number.
  float share_or(const char* key, double fallback) {
    const double value = file_.number_or(use(key), fallback);
    return value == 0 ? 0.0f : checked(key, value);
  }

  bool flag_or(const char* key, bool fallback) { return file_.boolean_or(use(key), fallback); }
  std::vector<int64_t> integers(const char* key) { return file_.integers(use(key)); }
  std::vector<bool> flags(const char* key) { return file_.booleans(use(key)); }
  std::string_view string_or(const char* key, std::string_view fallback) {
    return file_.string_or(use(key), fallback);
  }
  bool has(const char* key) const { return file_.find(full(key)) != nullptr; }
  bool is_array(const char* key) const {
    return has(key) && file_.find(full(key))->type == GgufType::array;
  }
  void ignore(const char* key) { use(key); }

  int32_t in_range(const char* key, int64_t value) const {
    constexpr int64_t kMax = int64_t{1} << 24;
    if (value < 1 || value > kMax) {
      fail(full(key), " is ", value, ", expected 1 to ", kMax);
    }
    return static_cast<int32_t>(value);
  }

  bool zero_or_missing(const char* key) { return !has(key) || value(use(key)) == 0; }

  // An unread key would silently change the result.
  void expect_all_used() {
    for (const auto& [key, neutral] : kNeutral) {
      if (has(key) && !used_.contains(full(key)) && value(full(key)) == neutral) use(key);
    }
    const std::string prefix = architecture_ + ".";
    for (const auto& [key, found] : file_.metadata()) {
      if (!key.starts_with(prefix) || used_.contains(std::string(key))) continue;
      const auto begins = [own = key.substr(prefix.size())](std::string_view of) {
        return own.starts_with(of);
      };
      if (std::ranges::any_of(kOfEncoders, begins)) continue;
      fail("key ", quoted(key), " is ", description(key, found), ", which h2o does not support");
    }
  }

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... what) const {
    throw FormatError(concat("[model] ", file_.path(), ": ", what...));
  }

  std::string full(std::string_view key) const {
    const std::string name = concat(architecture_, ".", key);
    for (const auto& [other, of] : kOtherNames) {
      if (key != of || file_.find(name) != nullptr) continue;
      const std::string found = concat(architecture_, ".", other);
      if (file_.find(found) != nullptr) return found;
    }
    return name;
  }

 private:
  std::string use(const char* key) { return *used_.insert(full(key)).first; }

  // The value of a number or flag; NaN for any other type.
  double value(std::string_view key) const {
    const GgufValue& found = *file_.find(key);
    if (found.type == GgufType::string || found.type == GgufType::array) return std::nan("");
    return found.type == GgufType::boolean ? file_.boolean(key) : file_.number(key);
  }

  std::string description(std::string_view key, const GgufValue& found) const {
    if (found.type == GgufType::string) return quoted(file_.string(key));
    if (found.type == GgufType::boolean) return file_.boolean(key) ? "true" : "false";
    return found.type == GgufType::array ? type_name(found) : concat(file_.number(key));
  }

  int64_t same_in_layers(const char* key) {
    const std::vector<int64_t> counts = integers(key);
    if (counts.empty() || std::ranges::count(counts, counts[0]) != std::ssize(counts)) {
      fail(full(key), " differs between layers, which h2o does not support");
    }
    return counts[0];
  }

  float checked(const char* key, double value) const {
    if (!(value >= 1e-30 && value <= 1e30)) {
      fail(full(key), " is ", value, ", expected 1e-30 to 1e30");
    }
    return static_cast<float>(value);
  }

  const GgufFile& file_;
  std::string architecture_;
  std::unordered_set<std::string> used_;
};

}  // namespace h2o
