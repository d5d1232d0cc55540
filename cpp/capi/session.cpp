// h2o.h: sessions.
#include <algorithm>
#include <cstdlib>

#include "capi/handle_types.h"
#include "capi/options.h"

using namespace h2o;
using namespace h2o::capi;

h2o_status h2o_session_open(h2o_model* model, const h2o_session_options* options,
                            h2o_session** session) noexcept {
  if (session == nullptr) return H2O_INVALID_ARGUMENT;
  h2o_session* handle = *session = new (std::nothrow) h2o_session;
  if (handle == nullptr) return H2O_OUT_OF_MEMORY;
  return handle->call(Access::change, [&] {
    handle->session = std::make_unique<TextSession>(engine_parts(shared_model(model), options, 1));
  });
}

h2o_status h2o_session_free(h2o_session* session) noexcept { return free_handle(session); }

const char* h2o_session_error(const h2o_session* session) noexcept {
  return session == nullptr ? "the handle is NULL" : session->message();
}

h2o_status h2o_reset(h2o_session* session) noexcept {
  return call(session, Access::change, [&](TextSession& s) { s.reset(); });
}

void h2o_cancel(h2o_session* session) noexcept {
  if (session != nullptr && session->session != nullptr) session->session->cancel();
}

void h2o_clear_cancel(h2o_session* session) noexcept {
  if (session != nullptr && session->session != nullptr) session->session->clear_cancel();
}

h2o_status h2o_set_sampling(h2o_session* session, const h2o_sampling* sampling) noexcept {
  return call(session, Access::change, [&](TextSession& s) {
    const auto o = given(sampling, h2o_sampling H2O_SAMPLING);
    s.set_sampling(sampler_options(o), o.seeded != 0);
  });
}

h2o_status h2o_stream(h2o_session* session, const char* prompt, size_t n_bytes,
                      const h2o_stream_options* options, h2o_piece_callback callback, void* user,
                      h2o_generation* generation) noexcept {
  return call(session, Access::change, [&](TextSession& s) {
    require(callback != nullptr, "the callback is NULL");
    h2o_generation unused = H2O_GENERATION;
    h2o_generation& out = generation == nullptr ? unused : *generation;
    give(h2o_generation H2O_GENERATION, &out);  // is its size right?
    const auto sink = [&](const std::string& piece) {
      return callback(user, piece.c_str(), piece.size()) == 0;
    };
    give(s.stream(given(prompt, n_bytes), stream_options(options), sink), &out);
  });
}

h2o_status h2o_feed(h2o_session* session, const int32_t* tokens, size_t n_tokens) noexcept {
  return call(session, Access::change, [&](TextSession& s) { s.feed(given(tokens, n_tokens)); });
}

h2o_status h2o_decode(h2o_session* session, int32_t token) noexcept {
  return h2o_feed(session, &token, 1);
}

h2o_status h2o_sample(h2o_session* session, int32_t* token) noexcept {
  return call(session, Access::change, [&](TextSession& s) {
    require(token != nullptr, "token is NULL");
    *token = s.sample();
  });
}

h2o_status h2o_logits(h2o_session* session, const float** logits, int32_t* n_vocab) noexcept {
  return call(session, Access::change, [&](TextSession& s) {
    require(logits != nullptr && n_vocab != nullptr, "logits or n_vocab is NULL");
    const std::span<const float> found = s.logits();
    *logits = found.data();
    *n_vocab = static_cast<int32_t>(found.size());
  });
}

h2o_status h2o_stats(h2o_session* session, h2o_session_stats* stats) noexcept {
  return call(session, Access::look, [&](const TextSession& s) {
    const Session& in = s.session();
    const int32_t n_read = in.tokens_seen(0), n_kept = in.tokens_kept(0);
    give(h2o_session_stats{.size = sizeof(h2o_session_stats),
                           .n_tokens = s.n_tokens(),
                           .n_read = n_read,
                           .n_kept = n_kept,
                           .n_evicted = n_read - n_kept,
                           .n_ctx = in.options().n_ctx,
                           .room = in.room(0),
                           .cache_bytes = in.cache_bytes(),
                           .full_cache_bytes = in.full_cache_bytes(),
                           .archive_bytes = in.archive_bytes()},
         stats);
  });
}

h2o_status h2o_kept(h2o_session* session, int32_t layer, int32_t kv_head, int32_t* positions,
                    float* scores, size_t capacity, size_t* n_kept) noexcept {
  return call(session, Access::look, [&](const TextSession& s) {
    const Config& config = s.session().model().config;
    require(layer >= 0 && layer < config.n_layers, "layer is ", layer, ", the model has ",
            config.n_layers);
    require(kv_head >= 0 && kv_head < config.n_kv_heads, "kv_head is ", kv_head, ", the model has ",
            config.n_kv_heads);
    const std::vector<KvEntry> entries = s.session().entries(layer, 0, kv_head);
    std::vector<int32_t> found(entries.size());
    std::ranges::transform(entries, found.begin(), &KvEntry::position);
    give(found.data(), found.size(), positions, capacity, n_kept);
    if (scores != nullptr) std::ranges::transform(entries, scores, &KvEntry::score);
  });
}

h2o_status h2o_tokens(h2o_session* session, int32_t* tokens, size_t capacity,
                      size_t* n_tokens) noexcept {
  return call(session, Access::look, [&](const TextSession& s) {
    const std::vector<int32_t> found = s.tokens();
    give(found.data(), found.size(), tokens, capacity, n_tokens);
  });
}

h2o_status h2o_snapshot_save(h2o_session* session, void** bytes, size_t* n_bytes) noexcept {
  return call(session, Access::change, [&](const TextSession& s) {
    require(bytes != nullptr && n_bytes != nullptr, "bytes or n_bytes is NULL");
    const std::vector<std::byte> saved = s.save();
    void* copy = std::malloc(saved.size());
    if (copy == nullptr)
      throw OutOfMemory(concat("cannot allocate ", saved.size(), " bytes for a snapshot"));
    std::memcpy(copy, saved.data(), saved.size());
    *bytes = copy;
    *n_bytes = saved.size();
  });
}

void h2o_snapshot_free(void* bytes) noexcept { std::free(bytes); }

h2o_status h2o_snapshot_load(h2o_session* session, const void* bytes, size_t n_bytes) noexcept {
  return call(session, Access::change, [&](TextSession& s) {
    s.load(given(static_cast<const std::byte*>(bytes), n_bytes));
  });
}
