#include "model/session_options.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "model/layer_policies.h"
#include "model/model.h"
#include "model/retrieval_heads.h"

namespace h2o {
namespace {

// The KV heads if some layers have none; otherwise empty, which means all.
std::vector<int32_t> attention_heads(const Config& config) {
  std::vector<int32_t> heads;
  for (int32_t l = 0; !config.attention_layers.empty() && l < config.n_layers; ++l) {
    for (int32_t h = 0; config.attends(l) && h < config.n_kv_heads; ++h) {
      heads.push_back(l * config.n_kv_heads + h);
    }
  }
  return heads;
}

// An encoder has no cache, and reads texts whole.
SessionOptions resolve_encoder(const Model& model, SessionOptions options) {
  const std::string_view name = model.config.family->architecture;
  const KvPolicy full;
  require(std::ranges::all_of(options.policies, [&](const KvPolicy& p) { return p == full; }), name,
          " is an encoder, which has no cache: leave out the budget and the policy");
  require(options.archive.n_recalled == 0, name,
          " is an encoder, which has no cache: leave out the archive");
  require(options.max_drafts == 0, name,
          " is an encoder, which generates no text: leave out draft");
  options.n_batch = std::max(options.n_batch, options.n_ctx);
  return options;
}

// True if every layer evicts before the trained length: ranks are then always positions that the
// model was trained on, including the next token's.
bool may_roll(const Config& config, const SessionOptions& options) {
  const bool bounded =
      std::all_of(options.policies.begin(), options.policies.end(),
                  [&](const KvPolicy& policy) { return policy.budget() < options.n_ctx; });
  if (options.positions == Positions::rolling) {
    require(config.rope.layout != RopeLayout::none, config.family->architecture,
            " has no rotary positions, so positions cannot roll: leave positions at auto");
    require(config.can_roll(), config.family->architecture, " uses original positions in ",
            config.temperature_scale > 0 ? "the scale of its queries" : "some layers",
            ", so positions cannot roll: leave positions at auto");
    require(bounded, "rolling positions need a policy that keeps fewer tokens than ", options.n_ctx,
            " in every layer");
  }
  return bounded && config.can_roll() && options.positions != Positions::original;
}

// KvShape::layer_heads
std::vector<KvHeads> layer_heads(const Config& config) {
  std::vector<KvHeads> heads;
  for (const LayerSizes& sizes : config.layer_sizes) {
    heads.push_back({sizes.n_kv_heads, sizes.head_dim});
  }
  return heads;
}

}  // namespace

int32_t default_drafts(const Config& config) {
  return std::ranges::any_of(config.state_floats(), [](int64_t n) { return n > 0; }) ? 4 : 16;
}

int32_t batch_rows(const Model& model, const SessionOptions& options) {
  return options.n_batch == 0 ? model.backend->capabilities().n_batch : options.n_batch;
}

SessionOptions resolve(const Model& model, SessionOptions options) {
  const Config& config = model.config;
  if (options.policies.empty()) options.policies.emplace_back();
  options.policies = layer_policies(config, options.policies);
  if (options.n_ctx == 0) options.n_ctx = config.n_ctx_train;
  require(options.n_ctx > 0 && options.n_ctx <= config.n_ctx_train, "n_ctx is ", options.n_ctx,
          ", expected 1 to ", config.n_ctx_train, ", as trained");
  options.n_batch = batch_rows(model, options);
  require(options.n_batch > 0 && options.n_batch <= 65536, "n_batch is ", options.n_batch,
          ", expected 1 to 65536");
  require(options.n_sequences > 0 && options.n_sequences <= 65536, "n_sequences is ",
          options.n_sequences, ", expected 1 to 65536");
  if (options.max_sequences == 0) options.max_sequences = options.n_sequences;
  require(options.max_sequences >= options.n_sequences && options.max_sequences <= 65536,
          "max_sequences is ", options.max_sequences, ", expected ", options.n_sequences,
          " to 65536");
  require(options.max_drafts >= 0 && options.max_drafts <= kMaxDrafts, "max_drafts is ",
          options.max_drafts, ", expected 0 to ", kMaxDrafts);
  if (const int32_t rows = model.backend->capabilities().draft_rows; rows > 0) {
    options.max_drafts = std::min(options.max_drafts, rows - 1);
  }
  if (options.archive.n_recalled != 0) {
    require(config.alibi_max_bias == 0, config.family->architecture,
            " uses ALiBi, which does not support an archive: leave archive out");
    require(options.positions != Positions::rolling,
            "an archive does not support rolling positions: leave positions at auto");
    options.positions = Positions::original;
    if (options.archive.heads.empty()) options.archive.heads = attention_heads(config);
    if (options.archive_heads != 1) {
      options.archive.heads =
          retrieval_heads(model.file.first_file(), config, options.archive_heads);
    }
  }
  if (config.family->encoder) options = resolve_encoder(model, options);
  // A batch cannot have more rows than all sequences together.
  options.n_batch = static_cast<int32_t>(
      std::min(int64_t{options.n_batch}, int64_t{options.n_ctx} * options.max_sequences));
  return options;
}

KvShape cache_shape(const Model& model, const SessionOptions& options) {
  const Config& config = model.config;
  return {
      .n_layers = config.family->encoder ? 0 : config.n_layers,
      .n_sequences = options.n_sequences,
      .n_heads = config.n_heads,
      .n_kv_heads = config.n_kv_heads,
      .head_dim = config.head_dim,
      .layer_heads = layer_heads(config),
      .max_tokens = options.n_ctx,
      .max_rows = options.n_batch,
      .k_dtype = options.k_dtype,
      .v_dtype = options.v_dtype,
      .shared_values = config.latent.rank > 0,
      .rope = may_roll(config, options) ? model.weights.rope_for(config, options.n_ctx) : Rope{},
      .sources = config.kv_sources,
      .state_floats = config.state_floats(),
      .attention_layers = config.attention_layers,
      .archive = options.archive,
      .max_drafts = options.max_drafts,
  };
}

}  // namespace h2o
