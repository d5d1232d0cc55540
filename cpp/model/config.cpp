#include "model/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <vector>

#include "model/config_keys.h"
#include "model/file_kind.h"

namespace h2o {
namespace {

constexpr int32_t kMostTokenTypes = 1024;  // of an encoder, which uses two

// Keys of state-space layers, which files of Granite 4 have without such layers.
constexpr const char* kStateSpace[] = {"ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
                                       "ssm.inner_size", "ssm.time_step_rank"};

// The rotated dimensions of a head of head_dim.
int32_t read_n_rot(ConfigKeys& keys, const char* key, int32_t head_dim) {
  const int32_t n_rot = keys.count_or(key, head_dim);
  if (n_rot > head_dim || n_rot % 2 != 0) {
    keys.fail(keys.full(key), " is ", n_rot, ", expected even, at most ", head_dim);
  }
  return n_rot;
}

// The size of heads in layers with a window, or in those without.
int32_t head_dim_of(const Config& c, bool window) {
  for (int32_t l = 0; l < std::ssize(c.layer_sizes); ++l) {
    if ((c.window(l) > 0) == window) return c.layer_sizes[l].head_dim;
  }
  return c.head_dim;
}

RopeConfig read_rope(ConfigKeys& keys, const Config& c) {
  RopeConfig rope;
  rope.n_rot = read_n_rot(keys, "rope.dimension_count", head_dim_of(c, false));
  rope.layout = c.family->rope;
  if (c.family->mrope_halves && keys.is_array("rope.dimension_sections")) {
    const std::vector<int64_t> sections = keys.integers("rope.dimension_sections");
    if (sections.size() > 1 && sections[0] > 0 && sections[1] > 0) rope.layout = RopeLayout::halves;
  }
  rope.freq_base = keys.positive_or("rope.freq_base", c.family->rope_base);
  rope.magnitude = keys.positive_or("rope.scaling.attn_factor", 1);
  rope.n_ctx_orig = c.n_ctx_train;
  if (!keys.zero_or_missing("rope.scaling.original_context_length")) {
    rope.n_ctx_orig = keys.count("rope.scaling.original_context_length");
  }

  const std::string_view type = keys.string_or("rope.scaling.type", "linear");
  if (type == "none" || type == "longrope") return rope;  // factors are tensors
  if (type != "linear" && type != "yarn") {
    keys.fail(keys.full("rope.scaling.type"), " is ", quoted(type),
              ", supported: none, linear, yarn, longrope");
  }
  // Ollama's files of Gemma 3 from 4B on lack the factor, and the epsilon of norms.
  constexpr int32_t kScaledLength = 131072;
  if (c.family->norm_eps > 0 && !keys.has("attention.layer_norm_rms_epsilon") &&
      !keys.has("rope.scaling.factor") && c.n_ctx_train >= kScaledLength) {
    rope.freq_scale = 1.0f / 8;
    return rope;
  }
  // Some files use 0 for "no scaling".
  const char* key = keys.has("rope.scaling.factor") ? "rope.scaling.factor" : "rope.scale_linear";
  const float factor = keys.share_or(key, 1);
  rope.freq_scale = factor == 0 ? 1 : 1 / factor;
  if (type == "yarn") {
    rope.yarn = true;
    rope.yarn_whole = c.family->yarn_whole;
    rope.yarn_ext_factor = keys.share_or("rope.scaling.yarn_ext_factor", 1);
    rope.yarn_beta_fast = keys.positive_or("rope.scaling.yarn_beta_fast", 32);
    rope.yarn_beta_slow = keys.positive_or("rope.scaling.yarn_beta_slow", 1);
    const float log_factor = -0.1f * std::log(rope.freq_scale);
    const float multiplier = keys.share_or("rope.scaling.yarn_log_multiplier", 0);
    if (c.family->latent) {  // files have a tenth of the checkpoint's mscale_all_dim
      const float magnitude = 1 + 10 * multiplier * log_factor;
      rope.logit_scale = magnitude * magnitude;
      return rope;
    }
    if (keys.has("rope.scaling.yarn_attn_factor")) {  // replaces YaRN's own, as in transformers
      rope.magnitude *= keys.positive("rope.scaling.yarn_attn_factor");
    } else {
      if (rope.yarn_ext_factor != 0) rope.magnitude *= 1 + log_factor;
      rope.magnitude /= 1 + multiplier * log_factor;
    }
  }
  return rope;
}

// One flag per layer, with or without those of unused layers.
void check_flags(const ConfigKeys& keys, const char* key, const std::vector<bool>& flags,
                 const Config& c) {
  const auto n = std::ssize(flags);
  if (n != c.n_layers && n != c.n_layers + c.n_unused_layers) {
    keys.fail(keys.full(key), " has ", n, " flags, expected ", c.n_layers);
  }
}

SlidingWindow read_sliding_window(ConfigKeys& keys, const Config& c) {
  SlidingWindow window;
  const char* const size = "attention.sliding_window";
  const char* const pattern = "attention.sliding_window_pattern";
  window.period = c.family->window_period;
  if (keys.is_array(pattern)) {
    window.layers = keys.flags(pattern);
    check_flags(keys, pattern, window.layers, c);
  } else if (keys.has(pattern)) {
    window.period = keys.count(pattern);
  }
  if (!keys.zero_or_missing(size)) window.size = keys.count(size);
  if (!keys.has(size)) window.size = c.family->window_size;
  // A text's windows are symmetric: half of them before a token.
  if (c.family->encoder && window.size > 0) window.size = window.size / 2 + 1;
  if (window.size == 1) keys.fail(keys.full(size), " is 1, expected 2 or more");
  return window;
}

void read_scales(ConfigKeys& keys, Config& c) {
  const Family& family = *c.family;
  if (family.embedding_by_width) c.embedding_scale = std::sqrt(static_cast<float>(c.n_embd));
  if (family.has_multipliers) {
    const bool known = family.depth_scale > 0;
    c.embedding_scale = keys.positive_or("embedding_scale", known ? family.embedding_scale : 1);
    c.residual_scale = keys.positive_or(
        "residual_scale", known ? family.depth_scale / std::sqrt(double{1} * c.n_layers) : 1);
  }
  if (family.logit_scale != LogitScale::unknown) {
    const bool optional = family.base_width > 0 || family.state_space;  // as of Bamba
    const double fallback = family.base_width > 0 ? double{1} * c.n_embd / family.base_width : 1;
    const float scale =
        optional ? keys.positive_or("logit_scale", fallback) : keys.positive("logit_scale");
    c.logit_scale = family.logit_scale == LogitScale::divides ? 1 / scale : scale;
  }
  if (family.softcaps) {
    c.attn_softcap = keys.share_or("attn_logit_softcapping", family.attn_softcap);
    c.logit_softcap = keys.share_or("final_logit_softcapping", family.logit_softcap);
  }
}

void read_groups(ConfigKeys& keys, MixtureConfig& m) {
  constexpr int32_t kMost = Routes::kMaxGroups;
  if (keys.zero_or_missing("expert_group_count")) return keys.ignore("expert_group_used_count");
  m.n_groups = keys.count("expert_group_count");
  m.n_groups_used = m.n_groups == 1 ? keys.count_or("expert_group_used_count", 1)
                                    : keys.count("expert_group_used_count");
  if (m.n_groups > kMost || m.n_experts % m.n_groups != 0) {
    keys.fail(keys.full("expert_group_count"), " is ", m.n_groups, ", expected a divisor of ",
              "expert_count ", m.n_experts, ", at most ", kMost);
  }
  const int64_t n_choices = int64_t{m.n_experts} / m.n_groups * m.n_groups_used;
  if (m.n_groups_used > m.n_groups || n_choices < m.n_used) {
    keys.fail(keys.full("expert_group_used_count"), " is ", m.n_groups_used, " of ", m.n_groups,
              " groups of ", m.n_experts / m.n_groups, " experts, expected groups with at least ",
              m.n_used, " experts");
  }
}

MixtureConfig read_mixture(ConfigKeys& keys, const Config& c) {
  MixtureConfig m;
  if (!c.family->experts || keys.zero_or_missing("expert_count")) return m;
  m.n_experts = keys.count("expert_count");
  m.n_used = keys.count("expert_used_count");
  if (m.n_used > m.n_experts) {
    keys.fail(keys.full("expert_used_count"), " is ", m.n_used, ", expected 1 to expert_count ",
              m.n_experts);
  }
  m.n_ff = keys.count_or("expert_feed_forward_length", c.n_ff);
  if (c.family->shares_expert) m.n_ff_shared = m.n_ff;
  if (!keys.zero_or_missing("expert_shared_count")) {
    m.n_ff_shared =
        keys.in_range("expert_shared_count", int64_t{m.n_ff} * keys.count("expert_shared_count"));
  }
  if (!keys.zero_or_missing("expert_shared_feed_forward_length")) {
    m.n_ff_shared = keys.count("expert_shared_feed_forward_length");
  }
  if (!keys.zero_or_missing("leading_dense_block_count")) {
    m.n_dense = std::min(keys.count("leading_dense_block_count"), c.n_layers);
  }
  if (!keys.zero_or_missing("interleave_moe_layer_step")) {
    m.period = keys.count("interleave_moe_layer_step");
  }
  read_groups(keys, m);
  m.normalized = keys.flag_or("expert_weights_norm", c.family->experts_normalized);
  if (!keys.zero_or_missing("expert_weights_scale")) {
    m.scale = keys.positive("expert_weights_scale");
  }
  constexpr int32_t kSoftmax = 1, kSigmoid = 2;
  // equal to the softmax of all, with weights normalized to sum to 1
  constexpr int32_t kSoftmaxOfChosen = 3;
  const int32_t gating =
      keys.count_or("expert_gating_func", c.family->experts_sigmoid ? kSigmoid : kSoftmax);
  if (gating > kSoftmaxOfChosen) {
    keys.fail(keys.full("expert_gating_func"), " is ", gating,
              ", supported: 1 (softmax), 2 (sigmoid), 3 (softmax of the chosen)");
  }
  m.sigmoid = gating == kSigmoid;
  m.normalized = m.normalized || gating == kSoftmaxOfChosen;
  return m;
}

// A count that some layers have, and the others not.
struct PartialCount {
  int32_t count;
  std::vector<bool> layers;  // that have it; empty: all
};

// May be an array with a count for each layer, with or without unused ones.
PartialCount read_partial_count(ConfigKeys& keys, const Config& c, const char* key) {
  if (!keys.is_array(key)) return {keys.count(key), {}};
  std::vector<int64_t> counts = keys.integers(key);
  if (std::ssize(counts) == c.n_layers + c.n_unused_layers) counts.resize(c.n_layers);
  if (std::ssize(counts) != c.n_layers) {
    keys.fail(keys.full(key), " has ", counts.size(), " counts, expected ", c.n_layers);
  }
  PartialCount result{keys.in_range(key, std::ranges::max(counts)), {}};
  for (const int64_t count : counts) {
    if (count != 0 && count != result.count) {
      keys.fail(keys.full(key), " differs between the layers that have it, which h2o does not ",
                "support");
    }
    result.layers.push_back(count != 0);
  }
  return result;
}

std::vector<bool> others(std::vector<bool> layers) {
  layers.flip();
  return layers;
}

// Reads the number of KV heads. Layers of short convolutions and of state-space models have none,
// unless they are beside attention.
void read_kv_heads(ConfigKeys& keys, Config& c) {
  const char* const key = "attention.head_count_kv";
  const Family& family = *c.family;
  const bool alternates = family.short_conv || family.state_space;
  if (!alternates || family.state_beside_attention) {
    c.n_kv_heads = keys.count_or(key, c.n_heads);
    if (family.state_beside_attention) c.recurrent_layers.assign(c.n_layers, true);
    return;
  }
  const PartialCount kv_heads =
      keys.has(key) ? read_partial_count(keys, c, key) : PartialCount{c.n_heads, {}};
  c.n_kv_heads = kv_heads.count;
  c.attention_layers = kv_heads.layers;
  if (!family.single_blocks) c.recurrent_layers = others(kv_heads.layers);
}

// Reads which layers are which, where each is one block: those with neither KV heads nor a
// feed-forward block have a state.
void read_single_blocks(ConfigKeys& keys, Config& c) {
  const PartialCount ff = read_partial_count(keys, c, "feed_forward_length");
  c.n_ff = ff.count;
  c.ff_layers = ff.layers;
  for (int32_t l = 0; l < c.n_layers; ++l) {
    if (c.attends(l) && c.has_ff(l)) {
      keys.fail("layer ", l, " has attention and a feed-forward block, expected one of them in ",
                "attention.head_count_kv and feed_forward_length");
    }
    c.recurrent_layers.push_back(!c.attends(l) && !c.has_ff(l));
  }
}

void read_latent(ConfigKeys& keys, Config& c) {
  LatentConfig& m = c.latent;
  m.rank = keys.count("attention.kv_lora_rank");
  if (!keys.zero_or_missing("attention.q_lora_rank")) {
    m.q_rank = keys.count("attention.q_lora_rank");
  }
  // Files with keys and values in one matrix have the sizes of both as those of a cache.
  const bool absorbed = keys.has("attention.key_length_mla");
  m.head_dim = keys.count(absorbed ? "attention.key_length_mla" : "attention.key_length");
  m.v_dim = absorbed ? keys.count("attention.value_length_mla")
                     : keys.count_or("attention.value_length", c.n_embd / c.n_heads);
  for (const char* key : {"key_length", "value_length", "head_count_kv"}) {
    keys.ignore(concat("attention.", key).c_str());
  }
  const int32_t n_rot = keys.count("rope.dimension_count");
  if (n_rot >= m.head_dim) {
    keys.fail(keys.full("rope.dimension_count"), " is ", n_rot, ", expected less than the ",
              m.head_dim, " dimensions of a query");
  }
  c.n_kv_heads = 1;
  c.head_dim = n_rot + m.rank;
  c.rope = read_rope(keys, c);
  c.attn_scale = c.rope.logit_scale / std::sqrt(static_cast<float>(m.head_dim));
}

// The sizes of layers with a window and of others.
void read_mixed_sizes(ConfigKeys& keys, Config& c) {
  const char* const kv_key = "attention.head_count_kv";
  const std::vector<int32_t> kv = keys.counts(kv_key, c.n_layers);
  const std::vector<int32_t> ff = keys.counts("feed_forward_length", c.n_layers);
  const auto head_size = [&](const std::string& end, int32_t fallback) {
    const std::string key = "attention.key_length" + end, v_key = "attention.value_length" + end;
    const int32_t size =
        fallback > 0 ? keys.count_or(key.c_str(), fallback) : keys.count(key.c_str());
    if (keys.count_or(v_key.c_str(), size) != size) {
      keys.fail(keys.full(v_key), " differs from key_length", end, " ", size,
                ", which is not supported");
    }
    return size;
  };
  const int32_t size = head_size("", 0), window_size = head_size("_swa", size);
  for (int32_t l = 0; l < c.n_layers; ++l) {
    if (c.n_heads % kv[l] != 0) {
      keys.fail("attention.head_count ", c.n_heads, " is not a multiple of head_count_kv ", kv[l]);
    }
    c.layer_sizes.push_back({kv[l], c.window(l) > 0 ? window_size : size, ff[l]});
  }
  c.n_kv_heads = std::ranges::max(kv);
  c.n_ff = std::ranges::max(ff);
  c.head_dim = std::max(size, window_size);
  c.attn_scale = keys.positive_or("attention.scale", 1);
}

// The layers whose keys and values the last n read.
std::vector<int32_t> read_kv_sources(const ConfigKeys& keys, const Config& c, int32_t n) {
  std::vector<int32_t> sources;
  std::array<int32_t, 2> last = {-1, -1};  // with keys of its own: without a window, with one
  for (int32_t l = 0; l < c.n_layers; ++l) {
    int32_t& source = last[c.window(l) > 0 ? 1 : 0];
    if (l < c.n_layers - n) source = l;
    sources.push_back(source);
    if (source >= 0) continue;
    keys.fail(keys.full("attention.shared_kv_layers"), " is ", n, " of ", c.n_layers,
              ", but no layer before has keys and values for layer ", l);
  }
  return sources;
}

// The heads of attention and their sizes.
void read_heads(ConfigKeys& keys, Config& c) {
  read_kv_heads(keys, c);
  if (c.n_heads % c.n_kv_heads != 0) {
    keys.fail("attention.head_count ", c.n_heads, " is not a multiple of head_count_kv ",
              c.n_kv_heads);
  }
  if (!keys.has("attention.key_length") && c.n_embd % c.n_heads != 0) {
    keys.fail("embedding_length ", c.n_embd, " is not a multiple of attention.head_count ",
              c.n_heads);
  }
  c.head_dim = keys.count_or("attention.key_length", c.n_embd / c.n_heads);
  if (keys.count_or("attention.value_length", c.head_dim) != c.head_dim) {
    keys.fail(keys.full("attention.value_length"), " differs from key_length ", c.head_dim,
              ", which is not supported");
  }
  const bool by_width = c.family->scale_by_width == c.n_layers;
  const double width = by_width ? double{1} * c.n_embd / c.n_heads : c.head_dim;
  c.attn_scale = keys.positive_or("attention.scale", 1 / std::sqrt(width));
}

int32_t read_taps(ConfigKeys& keys, const char* key) {
  const int32_t n = keys.count(key);
  if (n < 2 || n > kMaxTaps) keys.fail(keys.full(key), " is ", n, ", expected 2 to ", kMaxTaps);
  return n;
}

DeltaNetConfig read_delta_net(ConfigKeys& keys) {
  DeltaNetConfig d;
  d.n_taps = read_taps(keys, "ssm.conv_kernel");
  d.head_dim = keys.count("ssm.state_size");
  d.n_k_heads = keys.count("ssm.group_count");
  d.n_v_heads = keys.count("ssm.time_step_rank");
  if (d.head_dim % kDeltaColumns != 0 || d.head_dim > kMaxDeltaHead) {
    keys.fail(keys.full("ssm.state_size"), " is ", d.head_dim, ", expected a multiple of ",
              kDeltaColumns, ", at most ", kMaxDeltaHead);
  }
  if (d.n_v_heads % d.n_k_heads != 0) {
    keys.fail("ssm.time_step_rank ", d.n_v_heads, " is not a multiple of ssm.group_count ",
              d.n_k_heads);
  }
  if (keys.count("ssm.inner_size") != d.v_width()) {
    keys.fail(keys.full("ssm.inner_size"), " differs from ssm.time_step_rank ", d.n_v_heads,
              " * ssm.state_size ", d.head_dim, ", which is not supported");
  }
  return d;
}

StateSpaceConfig read_state_space(ConfigKeys& keys) {
  StateSpaceConfig s;
  s.n_taps = read_taps(keys, "ssm.conv_kernel");
  s.d_state = keys.count("ssm.state_size");
  s.n_groups = keys.count("ssm.group_count");
  s.n_heads = keys.count("ssm.time_step_rank");
  const int32_t width = keys.count("ssm.inner_size");
  s.head_dim = width / s.n_heads;
  if (s.width() != width || s.head_dim % kDeltaColumns != 0) {
    keys.fail(keys.full("ssm.inner_size"), " is ", width, ", expected ssm.time_step_rank ",
              s.n_heads, " heads of a multiple of ", kDeltaColumns);
  }
  if (s.n_heads % s.n_groups != 0) {
    keys.fail("ssm.time_step_rank ", s.n_heads, " is not a multiple of ssm.group_count ",
              s.n_groups);
  }
  if (s.d_state > kMaxStateSize) {
    keys.fail(keys.full("ssm.state_size"), " is ", s.d_state, ", expected at most ", kMaxStateSize);
  }
  return s;
}

std::vector<bool> read_delta_net_layers(ConfigKeys& keys, const Config& c) {
  std::vector<bool> layers;
  if (keys.has("attention.recurrent_layers")) {
    layers = keys.flags("attention.recurrent_layers");
    keys.ignore("full_attention_interval");
    check_flags(keys, "attention.recurrent_layers", layers, c);
    layers.resize(c.n_layers);
  } else {
    const int32_t interval = keys.count_or("full_attention_interval", 4);
    for (int32_t l = 0; l < c.n_layers; ++l) layers.push_back((l + 1) % interval != 0);
  }
  return layers;
}

// Logarithms in the file, as in checkpoints: alpha_p and alpha_n - beta are their softplus.
std::vector<Xielu> read_xielu(ConfigKeys& keys, const GgufFile& file, const Config& c) {
  const auto values = [&](const char* key) {
    const std::vector<double> all = file.numbers(key);
    if (std::ssize(all) != c.n_layers) {
      keys.fail(key, " has ", all.size(), " numbers, expected ", c.n_layers);
    }
    return all;
  };
  const auto softplus = [](double x) { return std::log1p(std::exp(x)); };
  const std::vector<double> p = values("xielu.alpha_p"), n = values("xielu.alpha_n");
  const std::vector<double> beta = values("xielu.beta"), eps = values("xielu.eps");
  std::vector<Xielu> layers;
  for (int32_t l = 0; l < c.n_layers; ++l) {
    layers.push_back({static_cast<float>(softplus(p[l])),
                      static_cast<float>(beta[l] + softplus(n[l])), static_cast<float>(beta[l]),
                      static_cast<float>(eps[l])});
  }
  return layers;
}

// llama.cpp computes the form with tanh, and files do not say which it was; encoders but
// Gemma's have the exact one.
bool read_gelu_erf(const ConfigKeys& keys, const GgufFile& file) {
  const Family& family = keys.family();
  const bool exact = family.encoder && family.norm == NormKind::layer;
  const std::string_view usual = exact ? "gelu_erf" : "gelu_tanh";
  const std::string_view name = file.string_or("h2o.activation", usual);
  if (name != "gelu_erf" && name != "gelu_tanh") {
    keys.fail("h2o.activation is ", quoted(name), ", supported: gelu_erf, gelu_tanh");
  }
  return name == "gelu_erf";
}

// Some encoders have another gate than their family's others.
Gate read_gate(ConfigKeys& keys, const Family& family) {
  if (!family.encoder || !keys.has("hidden_activation")) return family.gate;
  const std::string_view name = keys.string_or("hidden_activation", "");
  if (name == "silu") return Gate::swiglu;
  if (name == "gelu" || name == "gelu_pytorch_tanh") return Gate::geglu;
  keys.fail(keys.full("hidden_activation"), " is ", quoted(name),
            ", supported: gelu, gelu_pytorch_tanh, silu");
}

void read_encoder(ConfigKeys& keys, const GgufShards& model, Config& c) {
  if (keys.flag_or("attention.causal", false)) {
    keys.fail(keys.full("attention.causal"), " is true, expected false for an encoder");
  }
  if (c.head_dim > kMostWholeHead) {
    keys.fail("heads have ", c.head_dim, " dimensions, expected at most ", kMostWholeHead);
  }
  const auto rows = [&](const char* name) {
    const Tensor tensor = model.tensor(concat(name, ".weight"));
    return tensor ? keys.in_range(name, tensor.rows) : 0;
  };
  c.n_dense_2 = rows("dense_2");
  c.n_dense_3 = rows("dense_3");
  c.n_token_types = rows("token_types");
  if (c.n_token_types > kMostTokenTypes) {
    keys.fail("token_types.weight has ", c.n_token_types, " rows, expected at most ",
              kMostTokenTypes);
  }
}

}  // namespace

int32_t Config::window(int32_t layer) const {
  const SlidingWindow& w = sliding_window;
  const int32_t number = family->window_first_free ? layer : layer + 1;
  const bool slides = !w.layers.empty() ? w.layers[layer] : w.period == 0 || number % w.period != 0;
  return slides ? w.size : 0;
}

bool Config::rotates(int32_t layer) const {
  if (rope.layout == RopeLayout::none) return false;
  if (family->window_rotated && sliding_window.size > 0) return window(layer) > 0;
  const int32_t period = family->unrotated_period;
  return period == 0 || (layer + 1) % period != 0;
}

bool Config::reads_last(int32_t layer) const {
  return kv_sources.empty() || std::find(kv_sources.begin() + layer + 1, kv_sources.end(),
                                         kv_sources[layer]) == kv_sources.end();
}

std::vector<int64_t> Config::state_floats() const {
  std::vector<int64_t> floats;
  const int64_t of_layer = short_conv_taps > 0      ? int64_t{short_conv_taps - 1} * n_embd
                           : state_space.n_taps > 0 ? state_space.state_floats()
                                                    : delta_net.state_floats();
  for (const bool recurrent : recurrent_layers) floats.push_back(recurrent ? of_layer : 0);
  return floats;
}

bool Config::can_roll() const {
  if (temperature_scale > 0 || normalizes_rotated()) return false;
  if (!kv_sources.empty()) return false;
  for (int32_t l = 0; l < n_layers; ++l) {
    if (!rotates(l) || rotates_by_window(l)) return false;
  }
  return true;
}

Config read_config(const GgufShards& model) {
  expect_text_model(model);
  ConfigKeys keys(model.first_file());
  Config c;
  c.family = &keys.family();
  expect_weights(model);
  c.n_ctx_train = keys.count("context_length");
  c.n_embd = keys.count("embedding_length");
  c.n_layers = keys.count("block_count");
  if (!keys.zero_or_missing("nextn_predict_layers")) {
    c.n_unused_layers = keys.count("nextn_predict_layers");
    c.n_layers = keys.in_range("block_count", c.n_layers - c.n_unused_layers);
  }
  c.n_heads = keys.count("attention.head_count");
  c.sliding_window = read_sliding_window(keys, c);
  if (c.family->mixed_sizes) {
    read_mixed_sizes(keys, c);
  } else if (c.family->single_blocks) {
    read_heads(keys, c);
    read_single_blocks(keys, c);
  } else {
    // Files of models with experts in all layers may lack the first.
    const bool dense = keys.has("feed_forward_length") || !c.family->experts;
    c.n_ff = keys.count(dense ? "feed_forward_length" : "expert_feed_forward_length");
    if (c.family->ff_is_both) c.n_ff = keys.in_range("feed_forward_length", c.n_ff / 2);
    c.family->latent ? read_latent(keys, c) : read_heads(keys, c);
  }
  if (c.family->layer_inputs) {
    const char* const n_shared = "attention.shared_kv_layers";
    const char* const n_inputs = "embedding_length_per_layer_input";
    if (!keys.zero_or_missing(n_shared)) {
      c.kv_sources = read_kv_sources(keys, c, keys.count(n_shared));
    }
    if (!keys.zero_or_missing(n_inputs)) c.n_layer_embd = keys.count(n_inputs);
  }
  // Some converters write the other kind's too.
  const char* eps = "attention.layer_norm_rms_epsilon";
  const char* other_eps = "attention.layer_norm_epsilon";
  if (c.family->norm == NormKind::layer) std::swap(eps, other_eps);
  // Nemotron-H and Phi-3.5-MoE have the other kind's alone.
  if (!keys.has(eps) && keys.has(other_eps)) std::swap(eps, other_eps);
  const bool lacks_eps = c.family->norm_eps > 0 && !keys.has(eps);
  c.norm_eps = lacks_eps ? c.family->norm_eps : keys.positive(eps);
  keys.ignore(other_eps);
  if (c.family->has_multipliers) {
    if (!c.family->state_space) {
      for (const char* key : kStateSpace) keys.ignore(key);
    }
    // Granite 4 without experts has the size of its only MLP here.
    if (keys.zero_or_missing("expert_count")) keys.ignore("expert_shared_feed_forward_length");
  }
  const int32_t alibi_layers = c.family->alibi_layers;
  const bool has_alibi = alibi_layers == 0 || alibi_layers == c.n_layers;
  if (c.family->rope != RopeLayout::none && !c.family->latent) c.rope = read_rope(keys, c);
  const bool lacks_positions =
      c.family->optional_rope && !keys.flag_or("rope.scaling.finetuned", true);
  if (lacks_positions) c.rope.layout = RopeLayout::none;
  if (c.family->rope == RopeLayout::none && !c.family->learned_positions) {
    for (const char* key : {"rope.dimension_count", "rope.freq_base"}) keys.ignore(key);
  }
  if (c.family->alibi_max_bias > 0 && has_alibi) c.rope.layout = RopeLayout::none;
  const bool in_blocks = c.family->block_windows;
  c.temperature_scale = keys.share_or("attention.temperature_scale", in_blocks ? 0.1 : 0);
  if (c.temperature_scale > 0) {
    c.temperature_length = keys.count_or("attention.temperature_length",
                                         in_blocks ? c.family->window_size : c.rope.n_ctx_orig);
  }
  if (c.family->clamps) c.qkv_clamp = keys.share_or("attention.clamp_kqv", 0);
  if (c.family->alibi_max_bias > 0 && has_alibi) {
    c.alibi_max_bias = keys.positive_or("attention.max_alibi_bias", c.family->alibi_max_bias);
  }
  read_scales(keys, c);
  if (c.family->window_unscaled) {
    const int32_t base = c.family->window_base;
    c.window_rope.n_rot = c.family->mixed_sizes
                              ? read_n_rot(keys, "rope.dimension_count_swa", head_dim_of(c, true))
                              : c.rope.n_rot;
    c.window_rope.freq_base =
        keys.positive_or("rope.freq_base_swa", base > 0 ? base : c.rope.freq_base);
  }
  c.mixture = read_mixture(keys, c);
  c.mixture.scale *= c.residual_scale;
  // Files of Maverick and Scout differ in nothing else that says so.
  constexpr int32_t kMaverick = 128;
  c.unit_norms = in_blocks && c.mixture.n_experts != kMaverick;
  if (c.family->delta_net) {
    c.delta_net = read_delta_net(keys);
    c.recurrent_layers = read_delta_net_layers(keys, c);
    c.attention_layers = others(c.recurrent_layers);
  }
  if (c.family->state_space) c.state_space = read_state_space(keys);
  if (c.family->short_conv) c.short_conv_taps = read_taps(keys, "shortconv.l_cache");
  c.parallel_residual = keys.flag_or("use_parallel_residual", c.family->parallel_residual);
  if (c.family->parallel_without_norm) c.parallel_residual = !model.tensor("blk.0.ffn_norm.weight");
  c.gate = read_gate(keys, *c.family);
  const bool gated = c.family->encoder && c.gate == Gate::geglu;
  if (c.family->activation == Activation::gelu || gated) {
    c.gelu_erf = read_gelu_erf(keys, model.first_file());
  }

  if (c.family->activation == Activation::xielu) c.xielu = read_xielu(keys, model.first_file(), c);

  const Tensor table = model.tensor("token_embd.weight");
  if (!table) keys.fail("tensor token_embd.weight is missing");
  c.n_vocab = static_cast<int32_t>(std::min<int64_t>(table.rows, INT32_MAX));
  const Tensor labels = model.tensor("cls.output.weight");
  if (c.family->encoder) read_encoder(keys, model, c);
  if (labels) c.n_labels = keys.in_range("classifier.output_labels", labels.rows);
  keys.expect_all_used();
  return c;
}

}  // namespace h2o
