// Out of memory in every allocation of a call: the call reports it, has changed nothing or only
// what it documents, and succeeds when repeated. Run under sanitizers, which detect leaks.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>

#include "allocations.h"
#include "capi_rig.h"

namespace h2o {
namespace {

const std::string kSmallModel = H2O_SOURCE_DIR "/tests/data/golden/opt_head_dim_one.gguf";
constexpr int64_t kMax = 100'000;  // far more allocations than a call makes

// Makes a call with each of its allocations failing in turn, then with none; `after` receives the
// status of each. spares_some: the call can succeed without some of them. Returns the number of
// allocations.
template <class Call, class After>
int64_t each_allocation_failing(Call call, After after, bool spares_some = false) {
  for (int64_t n = 1; n < kMax; ++n) {
    h2o_status status = H2O_OK;
    bool failed = false;
    {
      const FailingAllocation failing(n);
      status = call();
      failed = failing.failed();
    }
    CAPTURE(n);
    if (!spares_some || status != H2O_OK) CHECK(status == (failed ? H2O_OUT_OF_MEMORY : H2O_OK));
    after(status);
    if (!failed) return n - 1;
  }
  FAIL("the call never succeeds");
  return 0;
}

TEST_CASE("out of memory while loading a model") {
  h2o_model_options options = H2O_MODEL_OPTIONS;
  options.device = "cpu";
  options.n_threads = 2;
  h2o_model* model = nullptr;
  const int64_t n =
      each_allocation_failing([&] { return h2o_model_load(kSmallModel.c_str(), &options, &model); },
                              [&](h2o_status status) {
                                if (status != H2O_OK && model != nullptr)
                                  CHECK(std::strlen(h2o_model_error(model)) > 0);
                                const FailingAllocation failing(1, false);
                                CHECK(h2o_model_free(model) == H2O_OK);
                              },
                              true);  // it can do without system files that describe the machine
  MESSAGE(n << " allocations");
  CHECK(n > 100);
}

TEST_CASE("out of memory while opening a session") {
  const api::Model model = load_model(kSmallModel);
  const h2o_session_options options = with_budget(8);
  h2o_session* session = nullptr;
  const int64_t n =
      each_allocation_failing([&] { return h2o_session_open(model.handle(), &options, &session); },
                              [&](h2o_status status) {
                                if (status != H2O_OK && session != nullptr) {
                                  CHECK(std::strlen(h2o_session_error(session)) > 0);
                                }
                                const FailingAllocation failing(1, false);
                                CHECK(h2o_session_free(session) == H2O_OK);
                              });
  CHECK(n > 10);
}

struct Rig {
  explicit Rig(const api::Model& model) : session(open_session(model, with_budget(8))) {
    h2o_sampling sampling = H2O_SAMPLING;
    sampling.seeded = 1;
    sampling.seed = 3;
    sampling.repeat_penalty = 1.2f;  // so that it stores the tokens
    sampling.repeat_last_n = -1;
    session.set_sampling(sampling);
  }
  api::Session session;
};

TEST_CASE("text and tokens") {
  const api::Model model = load_model(kSmallModel);
  const char text[] = "The old man, and the sea";
  int32_t tokens[64];
  char out[128];
  size_t n = 0, n_bytes = 0;
  const auto ignore = [](h2o_status) {};
  each_allocation_failing(
      [&] { return h2o_tokenize(model.handle(), text, sizeof(text) - 1, 0, tokens, 64, &n); },
      ignore);
  each_allocation_failing(
      [&] { return h2o_detokenize(model.handle(), tokens, n, out, sizeof(out), &n_bytes); },
      ignore);
  CHECK(std::string(out, n_bytes) == model.detokenize(std::vector<int32_t>(tokens, tokens + n)));
}

// Calls that change a session: fails each of their allocations, starting from the same tokens.
TEST_CASE("out of memory during session calls") {
  const api::Model model = load_model(kSmallModel);
  const auto ignore_text = [](void*, const char*, size_t) { return 0; };
  const h2o_stream_options five = up_to(5);
  const char* const stops[] = {"a string that does not occur"};
  h2o_stream_options stopping = up_to(5);
  stopping.n_stop = 1;
  stopping.stop = stops;
  std::vector<int32_t> tokens(20, 5);
  const h2o_logit_bias bias = {7, 2.0f};
  h2o_sampling sampling = H2O_SAMPLING;
  sampling.n_logit_bias = 1;
  sampling.logit_bias = &bias;
  Rig beginning(model);
  beginning.session.feed(tokens);
  const std::string snapshot = beginning.session.save();

  const std::pair<const char*, std::function<h2o_status(h2o_session*)>> calls[] = {
      {"stream",
       [&](h2o_session* s) { return h2o_stream(s, "a", 1, &five, ignore_text, nullptr, nullptr); }},
      {"stream with stop strings",
       [&](h2o_session* s) {
         return h2o_stream(s, "a", 1, &stopping, ignore_text, nullptr, nullptr);
       }},
      {"feed", [&](h2o_session* s) { return h2o_feed(s, tokens.data(), tokens.size()); }},
      {"decode", [&](h2o_session* s) { return h2o_decode(s, 5); }},
      {"reset", [&](h2o_session* s) { return h2o_reset(s); }},
      {"set_sampling", [&](h2o_session* s) { return h2o_set_sampling(s, &sampling); }},
      {"load",
       [&](h2o_session* s) { return h2o_snapshot_load(s, snapshot.data(), snapshot.size()); }},
  };
  for (const auto& named : calls) {
    const std::string_view what = named.first;
    const auto& call = named.second;
    CAPTURE(what);
    Rig rig(model), untouched(model);
    untouched.session.load(snapshot);
    REQUIRE(call(untouched.session.handle()) == H2O_OK);
    rig.session.load(snapshot);
    const int64_t n = each_allocation_failing(
        [&] { return call(rig.session.handle()); },
        [&](h2o_status status) {
          // The tokens are those reported, and can be continued.
          const std::vector<int32_t> text = rig.session.tokens();
          CHECK(rig.session.stats().n_tokens == static_cast<int32_t>(text.size()));
          if (status == H2O_OK) {
            CHECK(rig.session.save() == untouched.session.save());
            return;
          }
          CHECK(std::strlen(h2o_session_error(rig.session.handle())) == 0);  // from h2o_stats
          const bool adds = what.starts_with("stream") || what == "feed" || what == "decode";
          if (!adds) CHECK(rig.session.save() == snapshot);
          CHECK(text.size() >= tokens.size());
          int32_t token = -1;
          CHECK(h2o_sample(rig.session.handle(), &token) == H2O_OK);
          CHECK(rig.session.stats().n_read == static_cast<int32_t>(text.size()));
          // Compared with a session that processed the same tokens, a stream's one at a time.
          Rig fresh(model);
          fresh.session.load(snapshot);
          const std::vector<int32_t> rest(text.begin() + tokens.size(), text.end());
          const size_t n_at_once = what.starts_with("stream") ? 1 : rest.size();
          for (size_t i = 0; i < rest.size(); i += n_at_once) {
            fresh.session.feed({rest.begin() + i, rest.begin() + i + n_at_once});
          }
          CHECK(rig.session.kept(0, 0) == fresh.session.kept(0, 0));
          rig.session.load(snapshot);
        });
    MESSAGE(what << ": " << n << " allocations");
  }
}

TEST_CASE("out of memory while saving a snapshot") {
  const api::Model model = load_model(kSmallModel);
  Rig rig(model);
  rig.session.feed(std::vector<int32_t>(20, 5));
  const std::string expected = rig.session.save();
  void* bytes = nullptr;
  size_t n_bytes = 0;
  const int64_t n = each_allocation_failing(
      [&] { return h2o_snapshot_save(rig.session.handle(), &bytes, &n_bytes); },
      [&](h2o_status status) {
        if (status != H2O_OK) CHECK(bytes == nullptr);
        if (status == H2O_OK) {
          CHECK(std::string(static_cast<char*>(bytes), n_bytes) == expected);
          h2o_snapshot_free(bytes);
        }
      });
  CHECK(n > 3);
}

TEST_CASE("an engine is freed without memory") {
  const api::Model model = load_model();
  const h2o_session_options options = H2O_SESSION_OPTIONS;
  h2o_engine* engine = nullptr;
  REQUIRE(h2o_engine_open(model.handle(), &options, 1, &engine) == H2O_OK);
  const RequestOptions endless(200);
  std::vector<h2o_request*> requests(4);
  for (h2o_request*& request : requests) {
    REQUIRE(h2o_engine_submit(engine, "a", 1, &endless.request, &request) == H2O_OK);
  }
  {
    const FailingAllocation failing(1, false);
    CHECK(h2o_engine_free(engine) == H2O_OK);
  }
  for (h2o_request* request : requests) CHECK(h2o_request_free(request) == H2O_OK);
}

}  // namespace
}  // namespace h2o
