// Hostile arguments to the C API: rejected with a status and a message, without output, and without
// changing the session.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>

#include "capi_rig.h"

namespace h2o {
namespace {

int32_t ignore(void*, const char*, size_t) { return 0; }

// Captures writes to a file descriptor during its lifetime.
class Captured {
 public:
  explicit Captured(int fd) : fd_(fd), saved_(dup(fd)), file_(std::tmpfile()) {
    dup2(fileno(file_), fd_);
  }
  ~Captured() {
    dup2(saved_, fd_);
    close(saved_);
    std::fclose(file_);
  }
  off_t n_bytes() const { return lseek(fileno(file_), 0, SEEK_END); }

 private:
  int fd_, saved_;
  std::FILE* file_;
};

TEST_CASE("a NULL handle is an error and does not crash") {
  int32_t tokens[4] = {5};
  char text[4];
  size_t n = 0;
  const float* logits = nullptr;
  void* bytes = nullptr;
  h2o_model_info info = H2O_MODEL_INFO;
  h2o_session_stats stats = H2O_SESSION_STATS;
  CHECK(h2o_model_load("x", nullptr, nullptr) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_describe(nullptr, &info) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_tokenize(nullptr, "a", 1, 0, tokens, 4, &n) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_detokenize(nullptr, tokens, 1, text, 4, &n) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_is_end(nullptr, 2) == 0);
  CHECK(h2o_session_open(nullptr, nullptr, nullptr) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_reset(nullptr) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_set_sampling(nullptr, nullptr) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_stream(nullptr, "a", 1, nullptr, ignore, nullptr, nullptr) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_feed(nullptr, tokens, 1) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_sample(nullptr, tokens) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_decode(nullptr, 5) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_logits(nullptr, &logits, tokens) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_stats(nullptr, &stats) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_kept(nullptr, 0, 0, tokens, nullptr, 4, &n) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_tokens(nullptr, tokens, 4, &n) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_snapshot_save(nullptr, &bytes, &n) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_snapshot_load(nullptr, text, 4) == H2O_INVALID_ARGUMENT);
  h2o_cancel(nullptr);
  h2o_clear_cancel(nullptr);
  h2o_snapshot_free(nullptr);
  CHECK(h2o_model_free(nullptr) == H2O_OK);
  CHECK(h2o_session_free(nullptr) == H2O_OK);
  CHECK(std::strlen(h2o_model_error(nullptr)) > 0);
  CHECK(std::strlen(h2o_session_error(nullptr)) > 0);
  for (const h2o_status status : {-1, 0, 9, 10, INT32_MAX}) {
    CHECK(std::strlen(h2o_status_text(status)) > 0);
  }
}

TEST_CASE("a handle that could not be loaded has a message, and can only be freed") {
  const Captured out(1), err(2);
  h2o_model_options wrong_device = H2O_MODEL_OPTIONS, wrong_threads = H2O_MODEL_OPTIONS,
                    newer = H2O_MODEL_OPTIONS, sizeless = H2O_MODEL_OPTIONS,
                    reserved = H2O_MODEL_OPTIONS;
  wrong_device.device = "toaster";
  wrong_threads.n_threads = -1;
  newer.size += 8;
  sizeless.size = 0;
  reserved.reserved = 1;
  const std::string source = H2O_SOURCE_DIR "/README.md";
  const struct {
    const char* path;
    const h2o_model_options* options;
    h2o_status status;
    const char* message;
  } cases[] = {
      {nullptr, nullptr, H2O_INVALID_ARGUMENT, "path is NULL"},
      {"", nullptr, H2O_CANNOT_OPEN, ""},
      {"/nonexistent \xff.gguf", nullptr, H2O_CANNOT_OPEN, "No such file"},
      {H2O_SOURCE_DIR, nullptr, H2O_CANNOT_OPEN, ""},
      {source.c_str(), nullptr, H2O_BAD_FORMAT, "README.md"},
      {kTinyModel.c_str(), &wrong_device, H2O_INVALID_ARGUMENT, "toaster"},
      {kTinyModel.c_str(), &wrong_threads, H2O_INVALID_ARGUMENT, "n_threads is -1"},
      {kTinyModel.c_str(), &newer, H2O_INVALID_ARGUMENT, "the macro of its name"},
      {kTinyModel.c_str(), &sizeless, H2O_INVALID_ARGUMENT, "size 0"},
      {kTinyModel.c_str(), &reserved, H2O_INVALID_ARGUMENT, "reserved is 1"},
  };
  for (const auto& [path, options, status, message] : cases) {
    h2o_model* model = nullptr;
    CHECK(h2o_model_load(path, options, &model) == status);
    REQUIRE(model != nullptr);
    CAPTURE(h2o_model_error(model));
    CHECK(std::strstr(h2o_model_error(model), message) != nullptr);
    size_t n = 0;
    CHECK(h2o_tokenize(model, "a", 1, 0, nullptr, 0, &n) == H2O_INVALID_ARGUMENT);
    CHECK(h2o_is_end(model, 2) == 0);
    h2o_session* session = nullptr;
    CHECK(h2o_session_open(model, nullptr, &session) == H2O_INVALID_ARGUMENT);
    CHECK(std::strlen(h2o_session_error(session)) > 0);
    h2o_cancel(session);
    h2o_clear_cancel(session);
    CHECK(h2o_reset(session) == H2O_INVALID_ARGUMENT);
    CHECK(h2o_session_free(session) == H2O_OK);
    CHECK(h2o_model_free(model) == H2O_OK);
  }
  CHECK(out.n_bytes() == 0);
  CHECK(err.n_bytes() == 0);
}

TEST_CASE("session options out of range are rejected") {
  const api::Model model = load_model();
  const auto refused = [&](auto change) {
    h2o_session_options options = H2O_SESSION_OPTIONS;
    change(options);
    CHECK_THROWS_AS(api::Session(model, options), api::Error);
  };
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  for (const double hh : {-0.1, 1.5, 2.5, 1e-9, 1e300, nan, infinity}) {
    refused([&](h2o_session_options& o) { o.hh = hh; });
  }
  for (const double recent : {1.5, 11.0, 1e300, nan, infinity}) {
    refused([&](h2o_session_options& o) { o.hh = 10, o.recent = recent; });
  }
  refused([](h2o_session_options& o) { o.recent = 4; });
  refused([](h2o_session_options& o) { o.n_sinks = 4; });
  refused([](h2o_session_options& o) { o.hh = 10, o.n_sinks = 10; });
  refused([](h2o_session_options& o) { o.hh = 10, o.n_sinks = -1; });
  refused([](h2o_session_options& o) { o.hh = 5000, o.n_sinks = -1; });  // also for a full cache
  refused([](h2o_session_options& o) { o.policy = "mean"; });            // without hh
  refused([](h2o_session_options& o) { o.hh = 10, o.policy = "lru"; });
  refused([](h2o_session_options& o) { o.hh = 10, o.policy = ""; });
  refused([](h2o_session_options& o) { o.hh = 10, o.recent = 4, o.policy = "mean"; });
  refused([](h2o_session_options& o) { o.hh = 10, o.n_sinks = 4, o.policy = "mean"; });
  for (const int32_t number : {-1, INT32_MIN, INT32_MAX}) {
    refused([&](h2o_session_options& o) { o.n_ctx = number; });
    refused([&](h2o_session_options& o) { o.n_batch = number; });
    refused([&](h2o_session_options& o) { o.positions = number; });
  }
  refused([](h2o_session_options& o) {
    o.positions = H2O_POSITIONS_ROLLING;
  });  // OPT has learned positions
  refused([](h2o_session_options& o) { o.k_type = "q5_1"; });
  refused([](h2o_session_options& o) { o.v_type = ""; });
  refused([](h2o_session_options& o) { o.archive_pages = 4; });  // without an archive
  refused([](h2o_session_options& o) { o.archive_dir = "/tmp"; });
  refused([](h2o_session_options& o) { o.archive_heads = 0.5f; });  // without an archive
  refused([](h2o_session_options& o) { o.size = 7; });
  refused([](h2o_session_options& o) { o.size += 1; });
}

TEST_CASE("a refused budget is told which option, what it is and what was expected") {
  const api::Model model = load_model();
  h2o_session_options options = H2O_SESSION_OPTIONS;
  options.n_ctx = 1000;
  options.hh = 0.0005;
  CHECK_THROWS_WITH(api::Session(model, options),
                    "hh=0.0005 keeps no token of n_ctx=1000, expected at least 1");
  options.hh = 2.5;
  CHECK_THROWS_WITH(api::Session(model, options),
                    "hh=2.5, expected a fraction from 0 to 1 or a number of tokens");
  options.hh = 10;
  options.n_sinks = 10;
  CHECK_THROWS_WITH(api::Session(model, options),
                    "n_sinks=10, expected 0 to less than the 10 tokens of hh=10");
}

// Calls that are rejected, with the expected status.
struct Call {
  h2o_status status;
  std::function<h2o_status(h2o_session*)> run;
};

h2o_status stream(h2o_session* session, const std::function<void(h2o_stream_options&)>& change) {
  h2o_stream_options options = H2O_STREAM_OPTIONS;
  change(options);
  return h2o_stream(session, "a", 1, &options, ignore, nullptr, nullptr);
}

h2o_status sampling(h2o_session* session, const std::function<void(h2o_sampling&)>& change) {
  h2o_sampling options = H2O_SAMPLING;
  change(options);
  return h2o_set_sampling(session, &options);
}

const Call kRefused[] = {
    {H2O_INVALID_ARGUMENT,
     [](auto* s) { return h2o_stream(s, "a", 1, nullptr, nullptr, nullptr, nullptr); }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) { return h2o_stream(s, nullptr, 1, nullptr, ignore, nullptr, nullptr); }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) { return h2o_stream(s, "a", SIZE_MAX, nullptr, ignore, nullptr, nullptr); }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) { return h2o_stream(s, "a\xff", 2, nullptr, ignore, nullptr, nullptr); }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) {
       h2o_generation generation = H2O_GENERATION;
       generation.size = 1;
       return h2o_stream(s, "a", 1, nullptr, ignore, nullptr, &generation);
     }},
    {H2O_CONTEXT_FULL,
     [](auto* s) {
       const std::string text(1000, '0');
       return h2o_stream(s, text.data(), text.size(), nullptr, ignore, nullptr, nullptr);
     }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return stream(s, [](auto& o) { o.max_tokens = -2; }); }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return stream(s, [](auto& o) { o.n_stop = 1; }); }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return stream(s, [](auto& o) { o.size = SIZE_MAX; }); }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) {
       const char* const stops[] = {"x", nullptr};
       return stream(s, [&](auto& o) { o.n_stop = 2, o.stop = stops; });
     }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) {
       const char* const stops[] = {"x", ""};
       return stream(s, [&](auto& o) { o.n_stop = 2, o.stop = stops; });
     }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) {
       const char* const stops[] = {"\xc3"};
       return stream(s, [&](auto& o) { o.n_stop = 1, o.stop = stops; });
     }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) { return sampling(s, [](auto& o) { o.temperature = -1; }); }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return sampling(s, [](auto& o) { o.top_p = NAN; }); }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return sampling(s, [](auto& o) { o.size = 4; }); }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return h2o_feed(s, nullptr, 1); }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) {
       const int32_t token = 5;
       return h2o_feed(s, &token, SIZE_MAX);
     }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) {
       const int32_t tokens[] = {5, 4096};
       return h2o_feed(s, tokens, 2);
     }},
    {H2O_CONTEXT_FULL,
     [](auto* s) {
       const std::vector<int32_t> tokens(1000, 5);
       return h2o_feed(s, tokens.data(), tokens.size());
     }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return h2o_decode(s, -1); }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return h2o_sample(s, nullptr); }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return h2o_logits(s, nullptr, nullptr); }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return h2o_stats(s, nullptr); }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) {
       h2o_session_stats stats = H2O_SESSION_STATS;
       stats.size = 0;
       return h2o_stats(s, &stats);
     }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) {
       size_t n;
       return h2o_kept(s, -1, 0, nullptr, nullptr, 0, &n);
     }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) {
       size_t n;
       return h2o_kept(s, 0, 6, nullptr, nullptr, 0, &n);
     }},
    {H2O_INVALID_ARGUMENT,
     [](auto* s) {
       size_t n;
       return h2o_kept(s, 0, 0, nullptr, nullptr, 4, &n);
     }},
    {H2O_TOO_SMALL,
     [](auto* s) {
       size_t n;
       float score;
       return h2o_kept(s, 0, 0, nullptr, &score, 0, &n);
     }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return h2o_tokens(s, nullptr, 0, nullptr); }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return h2o_snapshot_save(s, nullptr, nullptr); }},
    {H2O_INVALID_ARGUMENT, [](auto* s) { return h2o_snapshot_load(s, nullptr, 1); }},
    {H2O_BAD_FORMAT, [](auto* s) { return h2o_snapshot_load(s, nullptr, 0); }},
    {H2O_BAD_FORMAT, [](auto* s) { return h2o_snapshot_load(s, "h2o snap", 8); }},
};

TEST_CASE("a rejected call changes nothing and prints nothing") {
  const Captured out(1), err(2);
  const api::Model model = load_model();
  api::Session tried = open_session(model, with_budget(8, 64));
  api::Session untouched = open_session(model, with_budget(8, 64));
  for (api::Session* session : {&tried, &untouched}) streamed(*session, "The old man", up_to(5));
  for (const Call& call : kRefused) {
    const std::string before = tried.save();
    CAPTURE(&call - kRefused);
    CHECK(call.run(tried.handle()) == call.status);
    CHECK(std::strlen(h2o_session_error(tried.handle())) > 0);
    CHECK(tried.save() == before);
    CHECK(std::strlen(h2o_session_error(tried.handle())) == 0);
  }
  CHECK(streamed(tried, " of", up_to(20)) == streamed(untouched, " of", up_to(20)));
  CHECK(out.n_bytes() == 0);
  CHECK(err.n_bytes() == 0);
}

TEST_CASE("an empty session has nothing to continue") {
  const api::Model model = load_model();
  api::Session session = open_session(model, with_budget(8));
  int32_t token = -7;
  CHECK(h2o_sample(session.handle(), &token) == H2O_INVALID_ARGUMENT);
  CHECK(token == -7);
  CHECK(h2o_stream(session.handle(), "", 0, nullptr, ignore, nullptr, nullptr) ==
        H2O_INVALID_ARGUMENT);
  CHECK(session.kept(0, 0).empty());
  CHECK(session.tokens().empty());
  session.load(session.save());
  CHECK(h2o_sample(session.handle(), &token) == H2O_INVALID_ARGUMENT);
}

TEST_CASE("snapshots that are damaged, or of another policy or model, are rejected") {
  const api::Model model = load_model(), other = load_model(kRotaryModel);
  api::Session source = open_session(model, with_budget(8));
  streamed(source, "The old man", up_to(20));
  const std::string good = source.save();
  api::Session session = open_session(model, with_budget(8)), wider(model, with_budget(9)),
               foreign(other, with_budget(8));
  const auto status = [](const api::Session& s, const std::string& bytes) {
    return h2o_snapshot_load(s.handle(), bytes.data(), bytes.size());
  };
  CHECK(status(wider, good) == H2O_BAD_FORMAT);
  CHECK(status(foreign, good) == H2O_BAD_FORMAT);
  for (const size_t at : {size_t{0}, size_t{9}, size_t{30}, good.size() / 2, good.size() - 1}) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    CHECK(status(session, bad) == H2O_BAD_FORMAT);
    CHECK(status(session, good.substr(0, at)) == H2O_BAD_FORMAT);
  }
  CHECK(status(session, good + "x") == H2O_BAD_FORMAT);
  CHECK(session.stats().n_tokens == 0);
  CHECK(status(session, good) == H2O_OK);
}

}  // namespace
}  // namespace h2o
