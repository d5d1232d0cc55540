// The C API: its output matches Session, Sampler and Tokenizer, and its queries are correct.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstring>
#include <filesystem>

#include "capi_rig.h"
#include "session_rig.h"
#include "text/sampler.h"
#include "text/tokenizer/tokenizer.h"

namespace h2o {
namespace {

constexpr std::string_view kPrompt = "It was a dark night, and the old man of the sea";

TEST_CASE("a stream is a prompt followed by repeated sample and step") {
  const api::Model model = load_model();
  api::Session session = open_session(model, with_budget(20), 7);
  const std::string text = streamed(session, kPrompt, up_to(60));

  const auto same = tiny_model(1);
  const Tokenizer tokenizer(same->file.first_file(), same->config.n_vocab);
  Session direct(same, {.policies = {{.heavy = 10, .recent = 10}}, .n_batch = 32});
  Sampler sampler({.seed = 7}, same->config.n_vocab);
  std::vector<int32_t> tokens = tokenizer.encode(kPrompt, {});
  const size_t n_prompt = tokens.size();
  std::vector<float> logits = feed(direct, 0, tokens);
  for (int i = 0; i < 60; ++i) {
    tokens.push_back(sampler.sample(logits));
    if (i < 59) logits = feed(direct, 0, {tokens.back()});
  }
  CHECK(session.tokens() == tokens);
  CHECK(text == tokenizer.decode(std::span(tokens).subspan(n_prompt)));

  const h2o_session_stats stats = session.stats();
  CHECK(stats.n_tokens == std::ssize(tokens));
  CHECK(stats.n_read == direct.tokens_seen(0));
  CHECK(stats.n_kept == 20);
  CHECK(stats.n_evicted == direct.tokens_seen(0) - 20);
  CHECK(stats.room == direct.room(0));
  CHECK(stats.cache_bytes == direct.cache_bytes());
  CHECK(stats.full_cache_bytes == Session(same, {}).cache_bytes());
  for (int32_t layer = 0; layer < same->config.n_layers; ++layer) {
    for (int32_t kv_head = 0; kv_head < same->config.n_kv_heads; ++kv_head) {
      size_t n = 0;
      std::vector<int32_t> positions(20);
      std::vector<float> scores(20);
      REQUIRE(h2o_kept(session.handle(), layer, kv_head, positions.data(), scores.data(), 20, &n) ==
              H2O_OK);
      const std::vector<KvEntry> entries = direct.entries(layer, 0, kv_head);
      REQUIRE(n == entries.size());
      for (size_t i = 0; i < n; ++i) {
        CHECK(positions[i] == entries[i].position);
        CHECK(same_bits(scores[i], entries[i].score));
      }
    }
  }
}

TEST_CASE("a session with an archive") {
  const api::Model model = load_model();
  h2o_session_options options = with_budget(20);
  options.archive = "f16";
  options.n_ctx = 1024;
  options.archive_pages = 1000;
  api::Session archived = open_session(model, options);
  options.archive_pages = 0;  // the default number
  api::Session some = open_session(model, options);
  options.archive_pages = 24;
  api::Session fixed = open_session(model, options);
  api::Session evicting = open_session(model, with_budget(20));
  std::string prompt;
  for (int i = 0; i < 20; ++i) prompt += kPrompt;
  const std::string directory = std::filesystem::temp_directory_path().string();
  if (!on_gpu()) options.archive_dir = directory.c_str();
  api::Session in_files = open_session(model, options);
  const std::string text = streamed(archived, prompt, up_to(20));
  const std::string by_default = streamed(fixed, prompt, up_to(20));
  CHECK(streamed(some, prompt, up_to(20)) == by_default);
  CHECK(streamed(in_files, prompt, up_to(20)) == by_default);
  CHECK(streamed(evicting, prompt, up_to(20)) != text);
  CHECK(archived.stats().archive_bytes > 0);
  CHECK(evicting.stats().archive_bytes == 0);
  if (on_gpu()) {  // counts and bounds of pages are copied to the device
    CHECK(archived.stats().cache_bytes > evicting.stats().cache_bytes);
  } else {
    CHECK(archived.stats().cache_bytes == evicting.stats().cache_bytes);
  }

  options.archive = "f16,q9";
  CHECK_THROWS_WITH_AS(api::Session(model, options),
                       doctest::Contains("archive, as the type of values, is 'q9'"), api::Error);
  options.archive = "q9";
  CHECK_THROWS_WITH_AS(api::Session(model, options), doctest::Contains("archive is 'q9'"),
                       api::Error);
  options.archive = "f16";
  options.archive_pages = -1;
  CHECK_THROWS_WITH_AS(api::Session(model, options), doctest::Contains("archive_pages is -1"),
                       api::Error);
  options.archive_pages = 0;
  options.archive_heads = 0.5f;
  CHECK_THROWS_WITH_AS(api::Session(model, options), doctest::Contains("does not rank its heads"),
                       api::Error);
  options.archive_heads = 1.5f;
  CHECK_THROWS_WITH_AS(api::Session(model, options), doctest::Contains("archive_heads is 1.5"),
                       api::Error);
  options.archive_heads = 0;
  options.archive_dir = "/nowhere/at/all";
  CHECK_THROWS_AS(api::Session(model, options), api::Error);
  options.archive = nullptr;
  CHECK_THROWS_WITH_AS(api::Session(model, options), doctest::Contains("are for an archive"),
                       api::Error);
}

TEST_CASE("token by token is the same as streaming") {
  const api::Model model = load_model();
  api::Session streaming = open_session(model, with_budget(0.05));
  api::Session stepping = open_session(model, with_budget(0.05));
  streamed(streaming, kPrompt, up_to(30));
  stepping.feed(model.tokenize(kPrompt));
  for (int i = 0; i < 30; ++i) stepping.decode(stepping.sample());
  CHECK(stepping.tokens() == streaming.tokens());
  const float* logits = nullptr;
  int32_t n_vocab = 0;
  REQUIRE(h2o_logits(stepping.handle(), &logits, &n_vocab) == H2O_OK);
  CHECK(n_vocab == model.info().n_vocab);
}

TEST_CASE("the next stream continues, and a reset starts over") {
  const api::Model model = load_model();
  api::Session parts = open_session(model, with_budget(0));
  api::Session whole = open_session(model, with_budget(0));
  streamed(parts, kPrompt, up_to(10));
  streamed(parts, "", up_to(10));
  streamed(whole, kPrompt, up_to(20));
  CHECK(parts.tokens() == whole.tokens());

  const std::vector<int32_t> before = parts.tokens();
  streamed(parts, "naïve", up_to(1));
  std::vector<int32_t> after = parts.tokens();
  const std::vector<int32_t> added = model.tokenize("naïve", H2O_CONTINUES);
  REQUIRE(after.size() == before.size() + added.size() + 1);
  CHECK(std::vector(after.begin() + before.size(), after.end() - 1) == added);

  parts.reset();
  CHECK(parts.stats().n_tokens == 0);
  CHECK(parts.stats().n_read == 0);
  parts = open_session(model, with_budget(0));
  streamed(parts, kPrompt, up_to(20));
  CHECK(parts.tokens() == whole.tokens());
}

TEST_CASE("an output of a sequence that can roll has n_ctx tokens unless max_tokens is -1") {
  const api::Model model = load_model(kRotaryModel);
  h2o_generation generation = H2O_GENERATION;
  api::Session session = open_session(model, with_budget(8, 24));
  streamed(session, kPrompt, up_to(0), &generation);
  CHECK(generation.finish == H2O_FINISH_LENGTH);
  CHECK(generation.n_generated == 24);  // wherever it begins
  streamed(session, "", up_to(0), &generation);
  CHECK(generation.finish == H2O_FINISH_LENGTH);
  CHECK(generation.n_generated == 24);

  session = open_session(model, with_budget(8, 24));
  int n_pieces = 0;
  generation =
      session.stream(kPrompt, [&](std::string_view) { return ++n_pieces < 100; }, up_to(-1));
  CHECK(generation.finish == H2O_FINISH_CANCELLED);
  CHECK(n_pieces == 100);

  session = open_session(model, with_budget(0, 24));  // cannot roll
  streamed(session, kPrompt, up_to(-1), &generation);
  CHECK(generation.finish == H2O_FINISH_LENGTH);
  CHECK(generation.n_prompt + generation.n_generated == 25);
}

TEST_CASE("generation ends at max_tokens, at a stop string and at the end of the context") {
  const api::Model model = load_model();
  h2o_generation generation = H2O_GENERATION;
  api::Session session = open_session(model, with_budget(0));
  const std::string text = streamed(session, kPrompt, up_to(50), &generation);
  CHECK(generation.finish == H2O_FINISH_LENGTH);
  CHECK(generation.n_generated == 50);
  CHECK(generation.n_prompt == std::ssize(model.tokenize(kPrompt)));

  const std::string stop = text.substr(text.size() / 2, 3);
  const char* const stops[] = {"nowhere \x01", stop.c_str()};
  h2o_stream_options options = up_to(50);
  options.n_stop = 2;
  options.stop = stops;
  session = open_session(model, with_budget(0));
  CHECK(streamed(session, kPrompt, options, &generation) == text.substr(0, text.find(stop)));
  CHECK(generation.finish == H2O_FINISH_STOP);
  CHECK(generation.n_generated < 50);

  session = open_session(model, with_budget(0, 24));
  streamed(session, kPrompt, up_to(0), &generation);
  CHECK(generation.finish == H2O_FINISH_LENGTH);
  CHECK(generation.n_prompt + generation.n_generated == 25);  // the last token is not processed
  CHECK(session.stats().room == 0);
  const std::vector<int32_t> tokens = session.tokens();
  for (const std::string_view prompt : {"", "more"}) {
    CHECK_THROWS_WITH_AS(streamed(session, prompt, up_to(0)),
                         doctest::Contains("there is room for 0; n_ctx is 24"), api::Error);
    CHECK(session.tokens() == tokens);
  }
}

TEST_CASE("with rolling positions generation continues past the context") {
  const api::Model model = load_model(kRotaryModel);
  h2o_session_options options = with_budget(8);
  api::Session session = open_session(model, options);
  h2o_generation generation = H2O_GENERATION;
  streamed(session, "a", up_to(200), &generation);
  CHECK(generation.n_generated == 200);
  CHECK(session.stats().n_ctx == 40);
  CHECK(session.stats().room > 1000);
  options.positions = H2O_POSITIONS_ORIGINAL;
  session = open_session(model, options);
  streamed(session, "a", up_to(200), &generation);
  CHECK(generation.n_prompt + generation.n_generated == 41);  // the last token is not processed
}

TEST_CASE("budgets are fractions or tokens") {
  const api::Model model = load_model();
  const auto kept = [&](double hh, double recent, int32_t n_sinks, int32_t n_ctx = 64) {
    h2o_session_options options = with_budget(hh, n_ctx);
    options.recent = recent;
    options.n_sinks = n_sinks;
    api::Session session = open_session(model, options);
    session.feed(std::vector<int32_t>(32, 5));
    session.feed(std::vector<int32_t>(16, 6));
    return session.kept(0, 0);
  };
  CHECK(kept(0, -1, 0).size() == 48);
  CHECK(kept(0.25, -1, 0).size() == 16);
  CHECK(kept(10, -1, 0).size() == 10);
  CHECK(kept(1, -1, 0).size() == 48);
  CHECK(kept(3, 3, 0) == std::vector<int32_t>{45, 46, 47});        // a window
  CHECK(kept(5, 3, 2) == std::vector<int32_t>{0, 1, 45, 46, 47});  // sinks and a window
  CHECK(kept(0.1, 0.05, 0).size() == 6);
  CHECK(kept(0.29, -1, 0, 100).size() == 28);  // 28.999..., rounded down as by the authors
}

TEST_CASE("tokens and text round-trip") {
  const api::Model model = load_model();
  const std::string text("NUL \0, 🦙, </s>", 17);
  CHECK(model.detokenize(model.tokenize(text)) == text);
  CHECK(model.tokenize("</s>", H2O_PARSE_SPECIAL) == std::vector<int32_t>{2});
  CHECK(model.tokenize("", H2O_ADD_SPECIAL) == std::vector<int32_t>{2});
  CHECK(model.detokenize({}) == "");
  CHECK(h2o_is_end(model.handle(), 2) == 1);
  CHECK(h2o_is_end(model.handle(), 5) == 0);
  const h2o_model_info info = model.info();
  CHECK(std::string_view(info.architecture) == "opt");
  CHECK(std::string_view(info.backend).starts_with(test_device()));
  CHECK(info.bos == 2);
  CHECK(info.n_ctx_train == 2048);
}

TEST_CASE("only the number is stored if the capacity is too small") {
  const api::Model model = load_model();
  int32_t tokens[] = {-7, -7, -7};
  size_t n = 0;
  CHECK(h2o_tokenize(model.handle(), "one two three four", 18, 0, tokens, 3, &n) == H2O_TOO_SMALL);
  CHECK(n > 3);
  CHECK(tokens[0] == -7);
  CHECK(h2o_tokenize(model.handle(), "one", 3, 8, tokens, 3, &n) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_tokenize(model.handle(), "one", 3, 0, tokens, 3, nullptr) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_tokenize(model.handle(), nullptr, 0, 0, nullptr, 0, &n) == H2O_OK);
  CHECK(n == 0);

  const std::vector<int32_t> abc = model.tokenize("abc", 0);
  char text[4] = "zzz";
  CHECK(h2o_detokenize(model.handle(), abc.data(), abc.size(), text, 3, &n) == H2O_TOO_SMALL);
  CHECK(n == 3);
  CHECK(std::strcmp(text, "zzz") == 0);
  CHECK(h2o_detokenize(model.handle(), abc.data(), abc.size(), text, 4, &n) == H2O_OK);
  CHECK(std::strcmp(text, "abc") == 0);
  CHECK(h2o_detokenize(model.handle(), nullptr, 1, text, 4, &n) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_detokenize(model.handle(), abc.data(), 1, text, 4, nullptr) == H2O_INVALID_ARGUMENT);
}

// A new field must not be placed in an older program's padding, which is uninitialized.
#define ENDS_WITH(type, last) \
  static_assert(offsetof(type, last) + sizeof(type::last) == sizeof(type))
ENDS_WITH(h2o_model_options, reserved);
ENDS_WITH(h2o_model_info, eos);
ENDS_WITH(h2o_session_options, reserved);
ENDS_WITH(h2o_sampling, logit_bias);
ENDS_WITH(h2o_stream_options, stop);
ENDS_WITH(h2o_generation, n_accepted);
ENDS_WITH(h2o_session_stats, archive_bytes);

TEST_CASE("programs built with an older header use shorter structures") {
  const api::Model model = load_model();
  api::Session session = open_session(model, with_budget(8));
  streamed(session, "The old man", up_to(4));
  h2o_session_stats stats = H2O_SESSION_STATS;
  stats.size = offsetof(h2o_session_stats, n_kept);
  stats.n_kept = -7;
  CHECK(h2o_stats(session.handle(), &stats) == H2O_OK);
  CHECK(stats.size == offsetof(h2o_session_stats, n_kept));
  CHECK(stats.n_tokens == session.stats().n_tokens);
  CHECK(stats.n_kept == -7);

  h2o_session_options options = with_budget(4);
  options.n_batch = -1;  // past the end of the old structure
  options.size = offsetof(h2o_session_options, n_batch);
  CHECK_NOTHROW(api::Session(model, options));
}

}  // namespace
}  // namespace h2o
