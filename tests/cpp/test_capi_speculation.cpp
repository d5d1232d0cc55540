// Drafts in the C API: the output is the same, and what was guessed is counted.
#include <doctest/doctest.h>

#include "capi_rig.h"

namespace h2o {
namespace {

constexpr std::string_view kPrompt =
    "It was a dark night, and the old man. It was a dark night, and";

TEST_CASE("drafts of each source change no text") {
  if (on_gpu()) return;
  const api::Model model = load_model();
  for (const double hh : {0.0, 12.0}) {
    api::Session plain = open_session(model, with_budget(hh));
    api::Session full = open_session(model, with_budget(0));
    const std::string expected = streamed(plain, kPrompt, up_to(50));
    const std::string of_full = streamed(full, kPrompt, up_to(50));
    for (const int32_t drafts : {H2O_DRAFTS_LOOKUP, H2O_DRAFTS_MODEL, H2O_DRAFTS_LOSSLESS}) {
      CAPTURE(drafts);
      h2o_session_options options = with_budget(hh);
      options.drafts = drafts;
      options.draft_max = 4;
      options.draft_tokens = 12;
      const api::Model small = load_model();
      if (drafts == H2O_DRAFTS_MODEL) options.draft_model = small.handle();
      api::Session session = open_session(model, options);
      h2o_generation result = H2O_GENERATION;
      const std::string text = streamed(session, kPrompt, up_to(50), &result);
      CHECK(text == (drafts == H2O_DRAFTS_LOSSLESS ? of_full : expected));
      CHECK(result.n_accepted <= result.n_drafted);
      if (drafts != H2O_DRAFTS_LOOKUP) CHECK(result.n_drafted > 0);  // at first
      if (drafts == H2O_DRAFTS_LOSSLESS) CHECK(session.stats().n_evicted == 0);

      api::Engine engine(model, 2, options);
      api::Request request = engine.submit(kPrompt, RequestOptions(50).request);
      CHECK(request.wait() == text);
      CHECK(engine.info().drafted_tokens == static_cast<uint64_t>(request.result().n_drafted));
      CHECK(engine.info().accepted_tokens == static_cast<uint64_t>(request.result().n_accepted));
    }
  }
}

TEST_CASE("options of drafts out of range are rejected") {
  const api::Model model = load_model(), other = load_model(kRotaryModel);
  const auto refused = [&](auto change) {
    h2o_session_options options = with_budget(12);
    change(options);
    CHECK_THROWS_AS(api::Session(model, options), api::Error);
  };
  for (const int32_t drafts : {-1, 4}) refused([&](h2o_session_options& o) { o.drafts = drafts; });
  refused([](h2o_session_options& o) { o.draft_max = -1; });
  refused([](h2o_session_options& o) { o.draft_tokens = -1; });
  refused([](h2o_session_options& o) { o.reserved = 1; });
  refused([](h2o_session_options& o) { o.drafts = H2O_DRAFTS_MODEL; });  // without a model
  refused([&](h2o_session_options& o) {
    o.drafts = H2O_DRAFTS_LOOKUP;
    o.draft_model = model.handle();
  });
  refused([](h2o_session_options& o) {
    o.drafts = H2O_DRAFTS_LOOKUP;
    o.draft_max = 100'000;
  });
  refused([](h2o_session_options& o) {
    o.drafts = H2O_DRAFTS_LOSSLESS;
    o.archive = "f16";
  });
  if (on_gpu()) return;
  h2o_session_options options = with_budget(12);
  options.drafts = H2O_DRAFTS_MODEL;
  options.draft_model = other.handle();
  CHECK_THROWS_WITH_AS(api::Session(model, options), doctest::Contains("another vocabulary"),
                       api::Error);
}

}  // namespace
}  // namespace h2o
