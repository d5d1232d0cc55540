// h2o.h: many requests at once.
#include <algorithm>
#include <utility>

#include "capi/handle_types.h"
#include "capi/options.h"

using namespace h2o;
using namespace h2o::capi;

namespace {

constexpr auto kNothingBetween = [] {};

// Calls `body` with a submitted request.
template <class Body>
h2o_status call(h2o_request* handle, Body body) noexcept {
  if (handle == nullptr) return H2O_INVALID_ARGUMENT;
  return handle->call(Access::change, [&] {
    require(handle->generation != nullptr, "this request could not be submitted");
    body(*handle);
  });
}

// The engine waits for the callback, so the callback must not wait for the engine.
bool is_in_callback(const h2o_request* request) {
  return request != nullptr && request->engine != nullptr && request->engine->in_callback();
}

Constraint constraint_by(const h2o_request_options& options) {
  if (options.constraint == nullptr) return nullptr;
  return [callback = options.constraint, user = options.user](std::span<const int32_t> tokens,
                                                              std::span<uint32_t> allowed) {
    if (callback(user, tokens.data(), tokens.size(), allowed.data(), allowed.size()) != 0) {
      throw Failure{H2O_CANCELLED, "the constraint has ended it"};
    }
  };
}

std::vector<int32_t> prompt_of(const Tokenizer& tokenizer, std::string_view text,
                               const h2o_request_options& options, bool parse_special) {
  const std::span<const int32_t> tokens = given(options.tokens, options.n_tokens);
  require(!tokens.empty() || !text.empty(), "the prompt is empty");
  if (tokens.empty()) return tokenizer.encode(text, {.parse_special = parse_special});
  require(text.empty(), "the prompt is given both as text and as tokens");
  return {tokens.begin(), tokens.end()};
}

// Returns a piece, which is stored in the handle.
void give_piece(h2o_request& request, std::optional<Piece> found, const char** piece,
                size_t* n_bytes) {
  request.piece = found ? std::move(found->text) : std::string();
  *piece = found ? request.piece.c_str() : nullptr;
  *n_bytes = request.piece.size();
}

void check_targets(const char* const* piece, const size_t* n_bytes) {
  require(piece != nullptr && n_bytes != nullptr, "piece or n_bytes is NULL");
}

}  // namespace

h2o_status h2o_engine_open(h2o_model* model, const h2o_session_options* options,
                           int32_t max_sequences, h2o_engine** engine) noexcept {
  if (engine == nullptr) return H2O_INVALID_ARGUMENT;
  h2o_engine* handle = *engine = new (std::nothrow) h2o_engine;
  if (handle == nullptr) return H2O_OUT_OF_MEMORY;
  return handle->call(Access::change, [&] {
    const EngineParts parts = engine_parts(shared_model(model), options, max_sequences);
    handle->engine = std::make_shared<Engine>(parts.core_model(), parts.tokenizer(), parts.session,
                                              prefix_options(options), parts.draft_model);
  });
}

h2o_status h2o_engine_free(h2o_engine* engine) noexcept {
  if (engine == nullptr) return H2O_OK;
  if (engine->engine != nullptr) {
    if (engine->engine->in_callback()) return H2O_BUSY;
    engine->engine->close();
  }
  delete engine;
  return H2O_OK;
}

const char* h2o_engine_error(const h2o_engine* engine) noexcept {
  return engine == nullptr ? "the handle is NULL" : engine->message();
}

h2o_status h2o_engine_describe(h2o_engine* engine, h2o_engine_info* info) noexcept {
  if (engine == nullptr || engine->engine == nullptr) return H2O_INVALID_ARGUMENT;
  try {
    const Engine& e = *engine->engine;
    const EngineStats stats = e.stats();
    give(h2o_engine_info{.size = sizeof(h2o_engine_info),
                         .n_sequences = stats.n_sequences,
                         .n_active = stats.n_active,
                         .n_waiting = stats.n_waiting,
                         .n_ctx = e.session().options().n_ctx,
                         .cache_bytes = e.session().cache_bytes(),
                         .prompt_tokens = static_cast<uint64_t>(stats.prompt_tokens),
                         .generated_tokens = static_cast<uint64_t>(stats.generated_tokens),
                         .cached_tokens = static_cast<uint64_t>(stats.cached_tokens),
                         .prefix_bytes = static_cast<uint64_t>(stats.prefix_bytes),
                         .drafted_tokens = static_cast<uint64_t>(stats.drafted_tokens),
                         .accepted_tokens = static_cast<uint64_t>(stats.accepted_tokens)},
         info);
  } catch (...) {
    return H2O_INVALID_ARGUMENT;
  }
  return H2O_OK;
}

h2o_status h2o_engine_submit(h2o_engine* engine, const char* prompt, size_t n_bytes,
                             const h2o_request_options* options, h2o_request** request) noexcept {
  if (request == nullptr) return H2O_INVALID_ARGUMENT;
  h2o_request* handle = *request = new (std::nothrow) h2o_request;
  if (handle == nullptr) return H2O_OUT_OF_MEMORY;
  return handle->call(Access::change, [&] {
    require(engine != nullptr && engine->engine != nullptr, "the engine is NULL or not open");
    const auto o = given(options, h2o_request_options H2O_REQUEST_OPTIONS);
    require(o.reserved == 0, "reserved is ", o.reserved, ", expected 0");
    require(std::min(o.protect_first, o.protect_last) >= 0, "protect_first is ", o.protect_first,
            " and protect_last ", o.protect_last, ", expected 0 or more tokens");
    require(o.n_top >= -1, "n_top is ", o.n_top, ", expected -1 (none) or more");
    const auto sampling = given(o.sampling, h2o_sampling H2O_SAMPLING);
    StreamOptions limits = stream_options(o.limits);
    Request made = {.prompt = prompt_of(engine->engine->tokenizer(), given(prompt, n_bytes), o,
                                        limits.parse_special),
                    .sampling = sampler_options(sampling),
                    .max_tokens = limits.max_tokens,
                    .stop = std::move(limits.stop),
                    .ignore_end = limits.ignore_end,
                    .protect = {o.protect_first, o.protect_last},
                    .constraint = constraint_by(o),
                    .drafts = true,
                    .eager = true};
    require(!made.prompt.empty(), "the prompt is empty");
    if (sampling.seeded == 0) made.sampling.seed = random_seed();
    if (o.n_top >= 0) made.trace = std::make_shared<Trace>(TraceOptions{.n_top = o.n_top});
    handle->engine = engine->engine;
    handle->generation = engine->engine->submit(std::move(made));
  });
}

h2o_status h2o_request_next(h2o_request* request, const char** piece, size_t* n_bytes) noexcept {
  if (is_in_callback(request)) return H2O_BUSY;
  return call(request, [&](h2o_request& r) {
    check_targets(piece, n_bytes);
    give_piece(r, r.engine->next(r.generation, kNothingBetween), piece, n_bytes);
  });
}

h2o_status h2o_request_poll(h2o_request* request, const char** piece, size_t* n_bytes) noexcept {
  return call(request, [&](h2o_request& r) {
    check_targets(piece, n_bytes);
    give_piece(r, r.engine->poll(r.generation), piece, n_bytes);
  });
}

void h2o_request_cancel(h2o_request* request) noexcept {
  if (request == nullptr || request->generation == nullptr) return;
  request->engine->cancel(request->generation);
}

h2o_status h2o_request_free(h2o_request* request) noexcept {
  if (request == nullptr) return H2O_OK;
  if (is_in_callback(request)) return H2O_BUSY;
  if (!request->retire()) return H2O_BUSY;
  if (request->generation != nullptr) {
    request->engine->cancel(request->generation);
    request->engine->wait_ended(request->generation);  // its constraint is not called any more
  }
  delete request;
  return H2O_OK;
}

const char* h2o_request_error(const h2o_request* request) noexcept {
  return request == nullptr ? "the handle is NULL" : request->message();
}

h2o_status h2o_request_result(h2o_request* request, h2o_generation* generation) noexcept {
  return call(request, [&](h2o_request& r) { give(result_of(*r.generation), generation); });
}

h2o_status h2o_request_text(h2o_request* request, char* text, size_t capacity,
                            size_t* n_bytes) noexcept {
  return call(request,
              [&](h2o_request& r) { give_text(r.generation->text(), text, capacity, n_bytes); });
}

h2o_status h2o_request_tokens(h2o_request* request, int32_t* tokens, size_t capacity,
                              size_t* n_tokens) noexcept {
  return call(request, [&](h2o_request& r) {
    const std::vector<int32_t> found = r.generation->generated_tokens();
    give(found.data(), found.size(), tokens, capacity, n_tokens);
  });
}

h2o_status h2o_request_logprobs(h2o_request* request, size_t i, h2o_logprob* logprob,
                                h2o_logprob* top, size_t capacity, size_t* n_top) noexcept {
  return call(request, [&](h2o_request& r) {
    const Trace* const trace = r.generation->request().trace.get();
    require(trace != nullptr, "the request does not keep log-probabilities: n_top is -1");
    require(logprob != nullptr, "logprob is NULL");
    require(i < trace->n_logprobs(), "token ", i, " is not generated yet: ", trace->n_logprobs(),
            " are");
    const TokenLogprob found = trace->logprobs(i, i + 1).front();
    std::vector<h2o_logprob> likeliest;
    for (const auto& [token, value] : found.top) {
      likeliest.push_back({token, static_cast<float>(value)});
    }
    give(likeliest.data(), likeliest.size(), top, capacity, n_top);
    *logprob = {found.token, static_cast<float>(found.logprob)};
  });
}
