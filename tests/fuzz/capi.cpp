// The C API: options, texts and tokens from the input, in any order of calls. Each call returns a
// documented status with a message, and leaves the session consistent.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "capi/h2o.h"
#include "core/utf8.h"
#include "target.h"

namespace {

constexpr size_t kMax = 4096;  // of tokens and bytes per call

h2o_model* model(size_t which) {
  static h2o_model* models[2] = {};
  static const char* const paths[] = {H2O_SOURCE_DIR "/tests/data/golden/opt_head_dim_one.gguf",
                                      H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf"};
  h2o_model*& found = models[which % 2];
  if (found == nullptr) {
    h2o_model_options options = H2O_MODEL_OPTIONS;
    options.device = "cpu";
    options.n_threads = 1;
    check(h2o_model_load(paths[which % 2], &options, &found) == H2O_OK, "a model");
  }
  return found;
}

// A message is set if and only if the status is an error.
void check_status(h2o_status status, const char* message) {
  check(status >= H2O_OK && status < H2O_INTERNAL_ERROR, "a status that is no internal error");
  check((status == H2O_OK) == (std::strlen(message) == 0), "a message, if there was an error");
  check(h2o::is_utf8(message), "a message in UTF-8");
}

// A typical number, or any value.
double number(Taker& from) {
  const uint8_t kind = from.byte();
  if (kind < 100) return kind;
  if (kind < 200) return (kind - 100) / 100.0;
  return from.take<double>();
}
int32_t integer(Taker& from) {
  const auto kind = from.take<int8_t>();
  return kind > -100 ? kind : from.take<int32_t>();
}

struct Calls {
  Taker& from;
  h2o_session* session;
  int n_pieces = 0;

  void end(h2o_status status) const { check_status(status, h2o_session_error(session)); }

  void sampling() {
    h2o_sampling options = H2O_SAMPLING;
    options.temperature = static_cast<float>(number(from));
    options.top_k = integer(from);
    options.top_p = static_cast<float>(number(from));
    options.min_p = static_cast<float>(number(from));
    options.repeat_penalty = static_cast<float>(number(from));
    options.repeat_last_n = integer(from);
    const uint8_t flags = from.byte();
    options.seeded = flags & 1;
    options.seed = from.byte();
    if (flags & 2) {
      options.frequency_penalty = static_cast<float>(number(from));
      options.presence_penalty = static_cast<float>(number(from));
    }
    h2o_logit_bias biases[4];
    options.logit_bias = biases;
    options.n_logit_bias = flags >> 2 & 3;
    for (size_t i = 0; i < options.n_logit_bias; ++i) {
      biases[i].token = integer(from);
      biases[i].bias = from.byte() & 1 ? -INFINITY : static_cast<float>(number(from));
    }
    if (flags & 16) {
      options.dry_multiplier = static_cast<float>(number(from));
      options.dry_base = static_cast<float>(number(from));
      options.dry_allowed_length = integer(from);
      options.dry_penalty_last_n = integer(from);
    }
    if (flags & 32) {
      options.typical_p = static_cast<float>(number(from));
      options.top_n_sigma = static_cast<float>(number(from));
      options.xtc_probability = static_cast<float>(number(from));
      options.xtc_threshold = static_cast<float>(number(from));
    }
    if (flags & 64) {
      options.dynatemp_range = static_cast<float>(number(from));
      options.dynatemp_exponent = static_cast<float>(number(from));
      options.mirostat = from.byte() % 4;
      options.mirostat_tau = static_cast<float>(number(from));
      options.mirostat_eta = static_cast<float>(number(from));
    }
    int32_t samplers[4];
    if (flags & 128) {
      for (int32_t& sampler : samplers) sampler = from.byte() % 10;
      options.samplers = samplers;
      options.n_samplers = 4;
    }
    end(h2o_set_sampling(session, &options));
  }

  static int32_t on_piece(void* user, const char* piece, size_t n_bytes) {
    auto& calls = *static_cast<Calls*>(user);
    check(n_bytes > 0 && piece[n_bytes] == '\0', "a piece that is not empty, with a NUL");
    check(h2o::is_utf8({piece, n_bytes}), "a piece in UTF-8");
    if (++calls.n_pieces % 5 == 0) h2o_cancel(calls.session);
    h2o_session_stats stats = H2O_SESSION_STATS;
    check(h2o_stats(calls.session, &stats) == H2O_OK, "a callback may query");
    return calls.n_pieces % 7 == 0;
  }

  void stream() {
    h2o_stream_options options = H2O_STREAM_OPTIONS;
    const uint8_t flags = from.byte();
    options.max_tokens = flags & 8 ? integer(from) : 1 + flags % 8;
    if (options.max_tokens == 0 || options.max_tokens == -1 || options.max_tokens > 16)
      options.max_tokens = 16;
    options.ignore_end = flags >> 4 & 1;
    options.parse_special = flags >> 5 & 1;
    const std::string stop(from.take_text(from.byte() % 6));
    const char* const stops[] = {stop.c_str()};
    options.stop = stops;
    options.n_stop = flags >> 6 & 1;
    std::string text(from.take_text(from.byte()));
    if (!(flags & 128)) text = h2o::repaired_utf8(text);
    h2o_generation generation = H2O_GENERATION;
    end(h2o_stream(session, text.data(), text.size(), &options, on_piece, this, &generation));
    check(generation.n_generated >= 0 && generation.n_generated <= 16, "at most max_tokens");
  }

  void feed() {
    std::vector<int32_t> tokens(from.byte() % 16);
    for (int32_t& token : tokens) token = from.byte() & 128 ? integer(from) : from.byte() % 16;
    end(h2o_feed(session, tokens.data(), tokens.size()));
  }

  void step() {
    int32_t token = 0;
    const h2o_status status = h2o_sample(session, &token);
    end(status);
    if (status == H2O_OK) end(h2o_decode(session, token));
  }

  void snapshot() {
    void* bytes = nullptr;
    size_t n = 0;
    const h2o_status status = h2o_snapshot_save(session, &bytes, &n);
    end(status);
    check(status == H2O_OK, "a snapshot");
    const uint8_t how = from.byte();
    if (how & 1 && n > 0) static_cast<char*>(bytes)[from.take<uint32_t>() % n] ^= 1;
    const size_t size = how & 2 ? from.take<uint32_t>() % n : n;
    const h2o_status loaded = h2o_snapshot_load(session, bytes, size);
    end(loaded);
    check(how & 3 || loaded == H2O_OK, "a saved snapshot loads");
    h2o_snapshot_free(bytes);
  }

  void look() {
    h2o_session_stats stats = H2O_SESSION_STATS;
    end(h2o_stats(session, &stats));
    std::vector<int32_t> tokens(kMax);
    std::vector<float> scores(kMax);
    size_t n = 0;
    end(h2o_tokens(session, tokens.data(), tokens.size(), &n));
    check(n == static_cast<size_t>(stats.n_tokens), "as many tokens as h2o_stats says");
    check(stats.n_read <= stats.n_tokens && stats.n_kept <= stats.n_read, "kept, read, tokens");
    end(h2o_kept(session, integer(from), integer(from), tokens.data(), scores.data(),
                 from.byte() % 32, &n));
  }

  void one() {
    switch (from.byte() % 9) {
      case 0:
        return sampling();
      case 1:
      case 2:
        return stream();
      case 3:
        return feed();
      case 4:
        return step();
      case 5:
        return snapshot();
      case 6:
        return look();
      case 7:
        return h2o_cancel(session);
      case 8:
        return end(h2o_reset(session));
    }
  }
};

void tokenize(h2o_model* model, Taker& from) {
  const uint32_t flags = from.byte() % 10;
  const std::string_view text = from.take_text(from.byte());
  std::vector<int32_t> tokens(from.byte());
  size_t n = 0;
  h2o_status status =
      h2o_tokenize(model, text.data(), text.size(), flags, tokens.data(), tokens.size(), &n);
  check_status(status, h2o_model_error(model));
  if (status != H2O_OK) return;
  std::vector<char> out(from.byte());
  status = h2o_detokenize(model, tokens.data(), n, out.data(), out.size(), &n);
  check_status(status, h2o_model_error(model));
  if (status == H2O_OK) check(n < out.size() && out[n] == '\0', "a NUL behind the text");
}

}  // namespace

int fuzz(std::span<const std::byte> bytes) {
  Taker from(bytes);
  const uint8_t flags = from.byte();
  h2o_model* const of = model(flags & 1);
  if (flags & 2) tokenize(of, from);
  h2o_session_options options = H2O_SESSION_OPTIONS;
  options.n_batch = 8;
  if (flags & 4) options.hh = number(from);
  if (flags & 8) options.recent = number(from);
  if (flags & 16) options.n_sinks = integer(from);
  if (flags & 32) options.n_ctx = integer(from);
  if (flags & 64) options.n_batch = integer(from);
  if (flags & 128) {
    static const char* const types[] = {"f16", "f32", "bf16", "q8_0", "q4_0", "q5_0", ""};
    options.k_type = types[from.byte() % 7];
    options.v_type = types[from.byte() % 7];
    options.positions = integer(from);
    const uint8_t archive = from.byte();
    if (archive & 1) options.archive = types[archive >> 1 & 3];
    if (archive & 8) options.archive_pages = integer(from);
    if (archive & 16) options.archive_heads = static_cast<float>(number(from));
    static const char* const policies[] = {"h2o", "sinks", "question", ""};
    if (archive & 32) options.policy = policies[archive >> 6];
  }
  h2o_session* session = nullptr;
  const h2o_status status = h2o_session_open(of, &options, &session);
  check_status(status, h2o_session_error(session));
  Calls calls{from, session};
  if (status == H2O_OK) {
    for (int i = 0; i < 12 && from.left() > 0; ++i) calls.one();
  }
  check(h2o_session_free(session) == H2O_OK, "a session that is freed");
  return 0;
}
