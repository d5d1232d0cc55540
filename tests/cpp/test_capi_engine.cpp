// The engine of the C API: each of many requests gets the same output as alone, and any thread may
// end it. Also run under ThreadSanitizer.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>

#include "allocations.h"
#include "capi_rig.h"

namespace h2o {
namespace {

constexpr std::string_view kPrompts[] = {"The old man", "It was a dark night, and", "a", "Of the"};

TEST_CASE("concurrent requests get the same output as sessions alone") {
  const api::Model model = load_model(kTinyModel, 2);
  const h2o_session_options options = with_budget(12);
  std::vector<std::string> alone, together;
  for (size_t i = 0; i < std::size(kPrompts); ++i) {
    api::Session session = open_session(model, options, i);
    alone.push_back(streamed(session, kPrompts[i], up_to(25)));
  }
  api::Engine engine(model, 2, options);  // some requests must wait
  std::vector<api::Request> requests;
  for (size_t i = 0; i < std::size(kPrompts); ++i) {
    requests.push_back(engine.submit(kPrompts[i], RequestOptions(25, i).request));
  }
  for (api::Request& request : requests) {
    std::string text;
    while (const auto piece = request.next()) text += *piece;
    CHECK(text == request.text());
    CHECK(request.result().finish == H2O_FINISH_LENGTH);
    CHECK(request.result().n_generated == 25);
    CHECK(request.tokens().size() == 25);
    CHECK(request.next() == std::nullopt);
    CHECK(request.poll() == std::nullopt);
    together.push_back(text);
  }
  CHECK(together == alone);
  const h2o_engine_info info = engine.info();
  CHECK(info.n_sequences == 2);
  CHECK(info.n_active == 0);
  CHECK(info.generated_tokens == 25 * std::size(kPrompts));
  CHECK(info.cache_bytes > open_session(model, options).stats().cache_bytes);
}

TEST_CASE("requests of several threads, waited for and polled") {
  const api::Model model = load_model();
  api::Engine engine(model, 3, with_budget(12));
  const std::string expected = engine.submit("The old man", RequestOptions(20).request).wait();
  std::vector<std::string> texts(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < texts.size(); ++i) {
    threads.emplace_back([&, i] {
      api::Request request = engine.submit("The old man", RequestOptions(20).request);
      if (i % 2 == 0) {
        texts[i] = request.wait();
        return;
      }
      while (request.result().finish == 0) {
        while (const auto piece = request.poll()) texts[i] += *piece;
        std::this_thread::yield();
      }
      while (const auto piece = request.poll()) texts[i] += *piece;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(texts == std::vector(texts.size(), expected));
}

TEST_CASE("a prompt is text or tokens") {
  const api::Model model = load_model();
  api::Engine engine(model, 1);
  RequestOptions options(10);
  const std::string text = engine.submit("The old man", options.request).wait();
  const std::vector<int32_t> tokens = model.tokenize("The old man");
  options.request.tokens = tokens.data();
  options.request.n_tokens = tokens.size();
  CHECK(engine.submit("", options.request).wait() == text);
  CHECK_THROWS_AS(engine.submit("The old man", options.request), api::Error);
}

TEST_CASE("the first tokens of a prompt are protected as sinks are, the last ones too") {
  const api::Model model = load_model();
  const std::string prompt = "The old man went down to the sea";
  const auto n = static_cast<int32_t>(model.tokenize(prompt).size());
  h2o_session_options with_sinks = with_budget(24);
  with_sinks.n_sinks = n;
  api::Session session = open_session(model, with_sinks);
  const std::string expected = streamed(session, prompt, up_to(60));
  api::Engine engine(model, 1, with_budget(24)), small(model, 1, with_budget(n));
  const auto text_of = [&](api::Engine& any, int32_t first, int32_t last) {
    RequestOptions options(60);
    options.request.protect_first = first;
    options.request.protect_last = last;
    return any.submit(prompt, options.request).wait();
  };
  const auto text = [&](int32_t first, int32_t last) { return text_of(engine, first, last); };
  CHECK(text(n, 0) == expected);
  CHECK(text(0, n) == expected);
  CHECK(text(0, 0) != expected);
  CHECK_THROWS_WITH(text_of(small, n, 0), doctest::Contains("protect"));
  CHECK_THROWS_WITH(text(0, -1),
                    "protect_first is 0 and protect_last -1, expected 0 or more tokens");
}

TEST_CASE("log-probabilities are those of the logits") {
  const api::Model model = load_model();
  api::Engine engine(model, 2, with_budget(12));
  RequestOptions options(15);
  options.request.n_top = 3;
  api::Request request = engine.submit("The old man", options.request);
  request.wait();
  const std::vector<int32_t> tokens = request.tokens();
  REQUIRE(tokens.size() == 15);
  api::Session session(model, with_budget(12));
  session.feed(model.tokenize("The old man"));
  for (size_t i = 0; i < tokens.size(); ++i) {
    const float* logits = nullptr;
    int32_t n_vocab = 0;
    REQUIRE(h2o_logits(session.handle(), &logits, &n_vocab) == H2O_OK);
    double sum = 0;
    for (int32_t t = 0; t < n_vocab; ++t) sum += std::exp(static_cast<double>(logits[t]));
    std::vector<h2o_logprob> top;
    const h2o_logprob found = request.logprob(i, &top);
    CHECK(found.token == tokens[i]);
    CHECK(found.logprob == doctest::Approx(logits[tokens[i]] - std::log(sum)).epsilon(1e-5));
    REQUIRE(top.size() == 3);
    const float most_likely = *std::max_element(logits, logits + n_vocab);
    CHECK(logits[top[0].token] == most_likely);
    CHECK(top[0].logprob >= top[1].logprob);
    CHECK(top[1].logprob >= top[2].logprob);
    session.decode(tokens[i]);
  }
  h2o_logprob found;
  size_t n = 0;
  CHECK(h2o_request_logprobs(request.handle(), 15, &found, nullptr, 0, &n) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_request_logprobs(request.handle(), 0, &found, nullptr, 0, &n) == H2O_TOO_SMALL);
  CHECK(n == 3);
  api::Request without = engine.submit("a", RequestOptions(1).request);
  without.wait();
  CHECK_THROWS_AS(without.logprob(0), api::Error);
}

TEST_CASE("a constraint determines the allowed tokens") {
  const api::Model model = load_model();
  api::Engine engine(model, 2, with_budget(12));
  const std::vector<int32_t> prompt = model.tokenize("The old man");
  const std::set<int32_t> digits = {21, 22, 23};
  std::vector<int32_t> seen;
  const auto only_digits = [&](const int32_t* tokens, size_t n_tokens, uint32_t* allowed,
                               size_t n_words) {
    CHECK(n_words == static_cast<size_t>(model.info().n_vocab + 31) / 32);
    seen.assign(tokens, tokens + n_tokens);
    for (const int32_t token : digits) api::allow(allowed, token);
  };
  api::Request request = engine.submit("The old man", RequestOptions(12).request, only_digits);
  request.wait();
  const std::vector<int32_t> tokens = request.tokens();
  REQUIRE(tokens.size() == 12);
  for (const int32_t token : tokens) CHECK(digits.count(token) == 1);
  std::vector<int32_t> expected = prompt;
  expected.insert(expected.end(), tokens.begin(), tokens.end() - 1);
  CHECK(seen == expected);

  const auto status_of = [&](const api::Constraint& constraint) {
    api::Request ended = engine.submit("a", RequestOptions(3).request, constraint);
    h2o_status status = H2O_OK;
    try {
      ended.wait();
    } catch (const api::Error& error) {
      status = error.status();
    }
    CHECK(ended.result().finish == H2O_FINISH_CANCELLED);
    CHECK(ended.result().n_generated == 0);
    CHECK(ended.next() == std::nullopt);  // the error is reported once
    return status;
  };
  CHECK(status_of([](auto...) {}) == H2O_INVALID_ARGUMENT);
  CHECK(status_of([](auto...) { throw std::runtime_error("mine"); }) == H2O_CANCELLED);
}

TEST_CASE("a constraint does not wait for its own engine") {
  const api::Model model = load_model();
  const RequestOptions options(2);
  h2o_engine* engine = nullptr;
  const h2o_session_options session = with_budget(12);
  REQUIRE(h2o_engine_open(model.handle(), &session, 1, &engine) == H2O_OK);
  struct User {
    h2o_engine* engine;
    h2o_request* other;
    std::vector<h2o_status> statuses;
  } user{engine, nullptr, {}};
  h2o_request_options made = options.request;
  REQUIRE(h2o_engine_submit(engine, "a", 1, &made, &user.other) == H2O_OK);
  made.user = &user;
  made.constraint = [](void* of, const int32_t*, size_t, uint32_t* allowed, size_t) {
    auto& [engine, other, statuses] = *static_cast<User*>(of);
    const char* piece = nullptr;
    size_t n = 0;
    statuses.push_back(h2o_request_next(other, &piece, &n));
    statuses.push_back(h2o_request_free(other));
    statuses.push_back(h2o_engine_free(engine));
    h2o_request_cancel(other);
    api::allow(allowed, 21);
    return 0;
  };
  h2o_request* request = nullptr;
  REQUIRE(h2o_engine_submit(engine, "a", 1, &made, &request) == H2O_OK);
  const char* piece = nullptr;
  size_t n = 0;
  do {
    REQUIRE(h2o_request_next(request, &piece, &n) == H2O_OK);
  } while (piece != nullptr);
  CHECK(user.statuses == std::vector<h2o_status>(6, H2O_BUSY));
  CHECK(h2o_request_free(user.other) == H2O_OK);
  CHECK(h2o_request_free(request) == H2O_OK);
  CHECK(h2o_engine_free(engine) == H2O_OK);
}

TEST_CASE("another thread ends a request") {
  const api::Model model = load_model(kRotaryModel);
  api::Engine engine(model, 2, with_budget(8));
  api::Request request = engine.submit("a", RequestOptions(-1).request);  // without a limit
  api::Request other = engine.submit("b", RequestOptions(20).request);
  REQUIRE(request.next());
  std::thread canceller([&] { request.cancel(); });
  while (request.next()) {
  }
  canceller.join();
  CHECK(request.result().finish == H2O_FINISH_CANCELLED);
  CHECK(other.wait() == engine.submit("b", RequestOptions(20).request).wait());
  CHECK(other.result().finish == H2O_FINISH_LENGTH);
}

TEST_CASE("a request that a thread waits for is busy") {
  const api::Model model = load_model(kRotaryModel);
  api::Engine engine(model, 1, with_budget(8));
  api::Request first = engine.submit("a", RequestOptions(-1).request);
  api::Request second =
      engine.submit("a", RequestOptions(-1).request);  // waits until the first has ended
  REQUIRE(first.next());
  std::thread waiter([&] {
    const char* piece = nullptr;
    size_t n = 0;
    while (h2o_request_next(second.handle(), &piece, &n) == H2O_BUSY) std::this_thread::yield();
    CHECK(n == 0);
  });
  // It is busy as soon as the thread waits.
  h2o_generation generation = H2O_GENERATION;
  while (h2o_request_result(second.handle(), &generation) != H2O_BUSY) std::this_thread::yield();
  CHECK(h2o_request_free(second.handle()) == H2O_BUSY);
  second.cancel();
  waiter.join();
  CHECK(second.result().finish == H2O_FINISH_CANCELLED);
  CHECK(second.result().n_generated == 0);
}

TEST_CASE("requests are freed while they are computed, and may outlive the engine") {
  const api::Model model = load_model(kRotaryModel);
  auto engine = std::make_unique<api::Engine>(model, 2, with_budget(8));
  std::vector<api::Request> left;
  for (int round = 0; round < 6; ++round) {
    api::Request request = engine->submit("a", RequestOptions(-1).request);
    if (round % 2 == 0) REQUIRE(request.next());
    if (round >= 4) left.push_back(std::move(request));
  }
  std::thread waiter([&] { left[0].wait(); });
  REQUIRE(left[1].next());
  engine.reset();
  waiter.join();
  for (api::Request& request : left) {
    request.wait();
    CHECK(request.result().finish == H2O_FINISH_CANCELLED);
    CHECK(request.tokens().size() == static_cast<size_t>(request.result().n_generated));
  }
}

TEST_CASE("engines and requests with invalid arguments say why") {
  const api::Model model = load_model();
  CHECK(h2o_engine_open(model.handle(), nullptr, 1, nullptr) == H2O_INVALID_ARGUMENT);
  for (const int32_t n : {0, -1, 65536, INT32_MAX}) {
    h2o_engine* engine = nullptr;
    CHECK(h2o_engine_open(model.handle(), nullptr, n, &engine) == H2O_INVALID_ARGUMENT);
    CHECK(std::strstr(h2o_engine_error(engine), "max_sequences is") != nullptr);
    h2o_engine_info info = H2O_ENGINE_INFO;
    CHECK(h2o_engine_describe(engine, &info) == H2O_INVALID_ARGUMENT);
    CHECK(h2o_engine_free(engine) == H2O_OK);
  }
  CHECK(h2o_engine_free(nullptr) == H2O_OK);
  CHECK(h2o_request_free(nullptr) == H2O_OK);
  CHECK(std::strlen(h2o_engine_error(nullptr)) > 0);
  CHECK(std::strlen(h2o_request_error(nullptr)) > 0);
  h2o_request_cancel(nullptr);
  const char* piece = nullptr;
  size_t n = 0;
  CHECK(h2o_request_next(nullptr, &piece, &n) == H2O_INVALID_ARGUMENT);

  api::Engine engine(model, 1, with_budget(0, 32));
  const auto status = [&](const char* prompt, const auto& change) {
    RequestOptions options(3);
    change(options);
    h2o_request* request = nullptr;
    const h2o_status status =
        h2o_engine_submit(engine.handle(), prompt, std::strlen(prompt), &options.request, &request);
    CHECK((std::strlen(h2o_request_error(request)) == 0) == (status == H2O_OK));
    if (status != H2O_OK) {
      CHECK(h2o_request_next(request, &piece, &n) == H2O_INVALID_ARGUMENT);
      h2o_request_cancel(request);
    } else {
      CHECK(h2o_request_next(request, nullptr, &n) == H2O_INVALID_ARGUMENT);
    }
    CHECK(h2o_request_free(request) == H2O_OK);
    return status;
  };
  const std::string full(1000, '0');
  const int32_t no_token = 1 << 30;
  CHECK(status("a", [](RequestOptions&) {}) == H2O_OK);
  CHECK(status("a", [](RequestOptions& o) { o.request.sampling = nullptr; }) == H2O_OK);
  CHECK(status("a", [](RequestOptions& o) { o.request.n_top = -2; }) == H2O_INVALID_ARGUMENT);
  CHECK(status("a", [](RequestOptions& o) { o.request.reserved = 1; }) == H2O_INVALID_ARGUMENT);
  CHECK(status("a", [](RequestOptions& o) { o.request.size += 8; }) == H2O_INVALID_ARGUMENT);
  CHECK(status("a", [](RequestOptions& o) { o.sampling.top_p = 2; }) == H2O_INVALID_ARGUMENT);
  CHECK(status("a", [](RequestOptions& o) { o.limits.max_tokens = -2; }) == H2O_INVALID_ARGUMENT);
  CHECK(status("\xff", [](RequestOptions&) {}) == H2O_INVALID_ARGUMENT);
  CHECK(status("", [](RequestOptions&) {}) == H2O_INVALID_ARGUMENT);
  CHECK(status("", [](RequestOptions& o) { o.request.n_tokens = 1; }) == H2O_INVALID_ARGUMENT);
  const h2o_logit_bias biases[] = {{5, 1}, {5, 2}};
  CHECK(status("a", [&](RequestOptions& o) {
          o.sampling.n_logit_bias = 2, o.sampling.logit_bias = biases;
        }) == H2O_INVALID_ARGUMENT);
  CHECK(status("", [&](RequestOptions& o) {
          o.request.tokens = &no_token, o.request.n_tokens = 1;
        }) == H2O_INVALID_ARGUMENT);
  CHECK(status(full.c_str(), [](RequestOptions&) {}) == H2O_CONTEXT_FULL);
  CHECK(h2o_engine_submit(engine.handle(), "a", 1, nullptr, nullptr) == H2O_INVALID_ARGUMENT);
  h2o_request* request = nullptr;
  CHECK(h2o_engine_submit(nullptr, "a", 1, nullptr, &request) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_request_free(request) == H2O_OK);
}

TEST_CASE("out of memory in an engine and its requests") {
  const api::Model model = load_model(H2O_SOURCE_DIR "/tests/data/golden/opt_head_dim_one.gguf");
  const h2o_session_options options = with_budget(8);
  bool failed = true;
  for (int64_t n = 1; failed; ++n) {
    h2o_engine* engine = nullptr;
    h2o_status status = H2O_OK;
    {
      const FailingAllocation failing(n);
      status = h2o_engine_open(model.handle(), &options, 2, &engine);
      failed = failing.failed();
    }
    CHECK(status == (failed ? H2O_OUT_OF_MEMORY : H2O_OK));
    CHECK(h2o_engine_free(engine) == H2O_OK);
  }
  api::Engine engine(model, 2, options);
  const RequestOptions five(5);
  const std::string expected = engine.submit("a", five.request).wait();
  failed = true;
  for (int64_t n = 1; failed; ++n) {
    h2o_request* request = nullptr;
    h2o_status status = H2O_OK;
    {
      const FailingAllocation failing(n);
      status = h2o_engine_submit(engine.handle(), "a", 1, &five.request, &request);
      failed = failing.failed();
    }
    CHECK(status == (failed ? H2O_OUT_OF_MEMORY : H2O_OK));
    CHECK(h2o_request_free(request) == H2O_OK);
  }
  CHECK(engine.submit("a", five.request).wait() == expected);
}

TEST_CASE("a request destroyed in the constraint of another does not lose its own") {
  const api::Model model = load_model();
  api::Engine engine(model, 2);
  const RequestOptions many(100);
  std::atomic<int> calls{0};
  const auto allow_all = [](uint32_t* allowed, size_t n) { std::fill_n(allowed, n, ~0u); };
  const std::string owned(100, 'a');  // by the constraint
  std::optional<api::Request> first = engine.submit(
      "a", many.request, [&, owned](const int32_t*, size_t, uint32_t* allowed, size_t n) {
        calls += owned[50] == 'a';
        allow_all(allowed, n);
      });
  while (calls == 0) std::this_thread::yield();
  api::Request second =
      engine.submit("b", many.request, [&](const int32_t*, size_t, uint32_t* allowed, size_t n) {
        first.reset();
        allow_all(allowed, n);
      });
  CHECK(second.wait() == engine.submit("b", many.request).wait());
}

TEST_CASE("special tokens are spelled, and a file has a chat template or none") {
  const api::Model model = load_model();
  CHECK(model.token_text(model.info().eos) == "</s>");
  CHECK_THROWS_AS(model.token_text(-1), api::Error);
  CHECK_THROWS_AS(model.token_text(model.info().n_vocab), api::Error);
  CHECK(model.chat_template().empty());
  CHECK(h2o_chat_template(model.handle(), nullptr) == H2O_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace h2o
