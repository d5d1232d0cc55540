#include "capi/options.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "capi/handle_types.h"
#include "core/utf8.h"
#include "io/utf8_path.h"
#include "kv/budget.h"
#include "kv/names.h"

namespace h2o::capi {
namespace {

// hh or recent: from 2 on, a whole number is one of tokens; anything else must be a fraction.
Amount amount_of(double value) {
  if (value >= 2 && value < 0x1p63 && value == std::floor(value)) {
    return static_cast<int64_t>(value);
  }
  return value;
}

KvPolicy policy_of(const h2o_session_options& options, int32_t n_ctx) {
  Budget budget = {.n_sinks = options.n_sinks};
  if (options.hh != 0) budget.hh = amount_of(options.hh);
  if (!(options.recent < 0)) budget.recent = amount_of(options.recent);  // also NaN
  if (options.policy != nullptr) budget.policy = options.policy;
  return budget_policy(budget, n_ctx);
}

DType kv_dtype_or_default(const char* name, const char* argument) {
  return name == nullptr ? DType::f16 : kv_dtype(name, argument);
}

ArchiveOptions archive_of(const h2o_session_options& options, int32_t n_ctx) {
  require(options.archive_pages >= 0, "archive_pages is ", options.archive_pages,
          ", expected 1 or more, or 0 for the default");
  const char* const directory = options.archive_dir;
  if (options.archive == nullptr) {
    require(options.archive_pages == 0 && options.archive_heads == 0 && directory == nullptr,
            "archive_pages, archive_heads and archive_dir are for an archive, which is NULL");
    return {};
  }
  const std::string_view types = options.archive;
  const size_t comma = types.find(',');
  const std::string_view k = types.substr(0, comma);
  const std::string_view v = comma == types.npos ? k : types.substr(comma + 1);
  const int32_t n_recalled =
      options.archive_pages == 0 ? default_archive_pages(n_ctx) : options.archive_pages;
  ArchiveOptions made = {n_recalled, archive_k_dtype(k), archive_v_dtype(v), {}};
  if (directory != nullptr) {
    require(directory[0] != '\0', "archive_dir is empty, expected a directory");
    require(is_utf8(directory), "archive_dir is not valid UTF-8");
    made.directory = path_of(directory);
  }
  return made;
}

Positions positions_of(int32_t positions) {
  if (positions == H2O_POSITIONS_AUTO) return Positions::automatic;
  if (positions == H2O_POSITIONS_ORIGINAL) return Positions::original;
  require(positions == H2O_POSITIONS_ROLLING, "positions is ", positions, ", expected 0 to 2");
  return Positions::rolling;
}

int32_t finish_of(Finish finish) {
  switch (finish) {
    case Finish::none:
      return 0;
    case Finish::stop:
      return H2O_FINISH_STOP;
    case Finish::length:
      return H2O_FINISH_LENGTH;
    default:
      return H2O_FINISH_CANCELLED;
  }
}

SessionOptions session_options(const h2o_session_options& o, int32_t n_ctx_train) {
  const int32_t n_ctx = o.n_ctx == 0 ? std::min(n_ctx_train, kDefaultContext) : o.n_ctx;
  require(n_ctx > 0, "n_ctx is ", n_ctx, ", expected 1 or more");
  return {.policies = {policy_of(o, n_ctx)},
          .n_ctx = n_ctx,
          .n_batch = o.n_batch,
          .k_dtype = kv_dtype_or_default(o.k_type, "k_type"),
          .v_dtype = kv_dtype_or_default(o.v_type, "v_type"),
          .positions = positions_of(o.positions),
          .archive = archive_of(o, n_ctx),
          .archive_heads = o.archive_heads == 0 ? 1 : o.archive_heads};
}

// Tokens that the cache of a draft model keeps.
KvPolicy draft_policy(const h2o_session_options& options, int32_t n_ctx) {
  const int32_t n = options.draft_tokens == 0 ? 512 : options.draft_tokens;
  return budget_policy({.hh = int64_t{std::min(n, n_ctx)}}, n_ctx);
}

// Throws InvalidArgument for a token that differs; one of the vocabularies may have more.
void check_vocabulary(const TextModel& draft, const TextModel& model) {
  const int32_t n = std::min(draft.model.config.n_vocab, model.model.config.n_vocab);
  for (int32_t token = 0; token < n; ++token) {
    const std::string got(draft.tokenizer.spelling(token));
    const std::string expected(model.tokenizer.spelling(token));
    require(got == expected, "draft_model has another vocabulary: token ", token, " is ",
            quoted(got), ", expected ", quoted(expected));
  }
}

// Completes `parts` with the options of drafts.
void add_drafts(const h2o_session_options& options, EngineParts& parts) {
  require(options.reserved == 0, "reserved is ", options.reserved, ", expected 0");
  require(options.draft_max >= 0 && options.draft_max <= kMaxDrafts, "draft_max is ",
          options.draft_max, ", expected 0 to ", kMaxDrafts);
  require(options.draft_tokens >= 0, "draft_tokens is ", options.draft_tokens,
          ", expected 0 or more");
  require((options.drafts == H2O_DRAFTS_MODEL) == (options.draft_model != nullptr),
          "draft_model is ", options.draft_model == nullptr ? "" : "not ", "NULL, drafts are ",
          options.drafts, ", expected H2O_DRAFTS_MODEL with a model only");
  SessionOptions& session = parts.session;
  if (options.drafts == H2O_DRAFTS_NONE) return;
  const Config& config = parts.model->model.config;
  session.max_drafts = options.draft_max == 0 ? default_drafts(config) : options.draft_max;
  switch (options.drafts) {
    case H2O_DRAFTS_LOOKUP:
      return;
    case H2O_DRAFTS_MODEL: {
      const std::shared_ptr<TextModel> draft = shared_model(options.draft_model);
      check_vocabulary(*draft, *parts.model);
      SessionOptions own;
      own.n_batch = session.n_batch;
      own.max_sequences = session.max_sequences;
      own.max_drafts = session.max_drafts;
      own.n_ctx = std::min(session.n_ctx, draft->model.config.n_ctx_train);
      own.policies = {draft_policy(options, own.n_ctx)};
      parts.draft_model = std::make_shared<DraftModel>(std::shared_ptr<Model>(draft, &draft->model),
                                                       own, parts.model->model.config.n_vocab);
      return;
    }
    case H2O_DRAFTS_LOSSLESS: {
      SessionOptions own = session;
      if (options.hh == 0) own.policies = {draft_policy(options, own.n_ctx)};
      parts.draft_model = DraftModel::of_full_cache(parts.core_model(), own);
      session.policies = {};
      return;
    }
    default:
      throw InvalidArgument(concat("drafts is ", options.drafts, ", expected 0 to 3"));
  }
}

}  // namespace

EngineParts engine_parts(std::shared_ptr<TextModel> model, const h2o_session_options* options,
                         int32_t n_sequences) {
  require(n_sequences > 0, "max_sequences is ", n_sequences, ", expected 1 or more");
  const auto o = given(options, h2o_session_options H2O_SESSION_OPTIONS);
  EngineParts parts = {std::move(model), {}, nullptr};
  parts.session = session_options(o, parts.model->model.config.n_ctx_train);
  parts.session.n_sequences = parts.session.max_sequences = n_sequences;
  add_drafts(o, parts);
  return parts;
}

PrefixCacheOptions prefix_options(const h2o_session_options* options) {
  const auto o = given(options, h2o_session_options H2O_SESSION_OPTIONS);
  PrefixCacheOptions made = {.max_bytes = o.prefix_cache};
  if (o.prefix_disk == nullptr) return made;
  require(o.prefix_disk[0] != '\0', "prefix_disk is empty, expected a directory");
  require(is_utf8(o.prefix_disk), "prefix_disk is not valid UTF-8");
  made.disk = {.directory = path_of(o.prefix_disk), .build = H2O_VERSION};
  if (o.prefix_disk_bytes != 0) made.disk.max_bytes = o.prefix_disk_bytes;
  return made;
}

// The defaults are those of text/sampler_options.h; tests/cpp/test_capi_sampling.cpp compares them.
static_assert(H2O_SAMPLER_PENALTIES == static_cast<int32_t>(SamplerStep::penalties));
static_assert(H2O_SAMPLER_DRY == static_cast<int32_t>(SamplerStep::dry));
static_assert(H2O_SAMPLER_TOP_N_SIGMA == static_cast<int32_t>(SamplerStep::top_n_sigma));
static_assert(H2O_SAMPLER_TEMPERATURE == static_cast<int32_t>(SamplerStep::temperature));
static_assert(H2O_SAMPLER_TOP_K == static_cast<int32_t>(SamplerStep::top_k));
static_assert(H2O_SAMPLER_TYPICAL_P == static_cast<int32_t>(SamplerStep::typical_p));
static_assert(H2O_SAMPLER_TOP_P == static_cast<int32_t>(SamplerStep::top_p));
static_assert(H2O_SAMPLER_MIN_P == static_cast<int32_t>(SamplerStep::min_p));
static_assert(H2O_SAMPLER_XTC == static_cast<int32_t>(SamplerStep::xtc));

SamplerOptions sampler_options(const h2o_sampling& sampling) {
  const h2o_sampling& s = sampling;
  SamplerOptions made = {.temperature = s.temperature,
                         .top_k = s.top_k,
                         .top_p = s.top_p,
                         .min_p = s.min_p,
                         .repeat_penalty = s.repeat_penalty,
                         .repeat_last_n = s.repeat_last_n,
                         .seed = s.seed,
                         .frequency_penalty = s.frequency_penalty,
                         .presence_penalty = s.presence_penalty,
                         .dry_multiplier = s.dry_multiplier,
                         .dry_base = s.dry_base,
                         .dry_allowed_length = s.dry_allowed_length,
                         .dry_penalty_last_n = s.dry_penalty_last_n,
                         .typical_p = s.typical_p,
                         .top_n_sigma = s.top_n_sigma,
                         .xtc_probability = s.xtc_probability,
                         .xtc_threshold = s.xtc_threshold,
                         .dynatemp_range = s.dynatemp_range,
                         .dynatemp_exponent = s.dynatemp_exponent,
                         .mirostat = s.mirostat,
                         .mirostat_tau = s.mirostat_tau,
                         .mirostat_eta = s.mirostat_eta};
  for (const auto& [token, bias] : given(s.logit_bias, s.n_logit_bias)) {
    made.logit_bias.push_back({token, bias});
  }
  const std::span<const char* const> breakers = given(s.dry_breakers, s.n_dry_breakers);
  if (s.dry_breakers != nullptr) {
    made.dry_breakers.emplace();
    for (const char* const breaker : breakers) {
      require(breaker != nullptr, "a string of dry_breakers is NULL");
      made.dry_breakers->emplace_back(breaker);
    }
  }
  require(s.n_samplers >= 0, "n_samplers is ", s.n_samplers, ", expected 0 or more");
  const std::span<const int32_t> samplers = given(s.samplers, static_cast<size_t>(s.n_samplers));
  if (s.samplers != nullptr) {
    made.samplers.emplace();
    for (const int32_t sampler : samplers) {
      require(sampler >= 0 && sampler <= H2O_SAMPLER_XTC, "samplers has ", sampler,
              ", expected 0 to 8");
      made.samplers->push_back(static_cast<SamplerStep>(sampler));
    }
  }
  return made;
}

StreamOptions stream_options(const h2o_stream_options* options) {
  const auto o = given(options, h2o_stream_options H2O_STREAM_OPTIONS);
  require(o.max_tokens >= kEndless, "max_tokens is ", o.max_tokens,
          ", expected 1 or more, 0 (n_ctx) or -1 (endless)");
  StreamOptions made = {.ignore_end = o.ignore_end != 0, .parse_special = o.parse_special != 0};
  if (o.max_tokens != 0) made.max_tokens = o.max_tokens;
  for (const char* const stop : given(o.stop, o.n_stop)) {
    require(stop != nullptr && stop[0] != '\0', "stop string ", made.stop.size(),
            " is empty, expected at least one character");
    require(is_utf8(stop), "stop string ", made.stop.size(), " is not valid UTF-8");
    made.stop.emplace_back(stop);
  }
  return made;
}

h2o_generation result_of(const Generation& generation) {
  const Progress progress = generation.progress();
  const std::vector<std::string>& stop = generation.request().stop;
  const auto found = std::ranges::find(stop, progress.stop_string);
  return {.size = sizeof(h2o_generation),
          .finish = finish_of(progress.finish),
          .n_prompt = progress.n_prompt,
          .n_generated = progress.n_generated,
          .prompt_seconds = progress.prompt_seconds,
          .decode_seconds = progress.decode_seconds,
          .stop = found == stop.end() ? -1 : static_cast<int32_t>(found - stop.begin()),
          .reserved = 0,
          .n_evicted = progress.forgotten.n_evicted,
          .n_archived = progress.forgotten.n_archived,
          .n_drafted = progress.n_drafted,
          .n_accepted = progress.n_accepted};
}

uint64_t random_seed() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace h2o::capi
