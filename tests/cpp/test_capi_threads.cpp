// The C API with threads: cancellation, concurrent calls, and that no thread is leaked. Also run
// under ThreadSanitizer.
#include <doctest/doctest.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <thread>

#include "capi_rig.h"

namespace h2o {
namespace {

#ifdef __linux__
size_t n_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

// Returns when at most n threads are left: a joined thread may still be exiting. If one remains,
// this never returns, and CTest reports a timeout.
void wait_for_threads(size_t n) {
  while (n_threads() > n) std::this_thread::yield();
}
#endif

TEST_CASE("another thread ends a stream") {
  const api::Model model = load_model(kRotaryModel);
  api::Session session = open_session(model, with_budget(8));
  std::thread other;
  int n_pieces = 0;
  const h2o_generation generation = session.stream(
      "a",
      [&](std::string_view) {
        if (++n_pieces == 1) other = std::thread([&] { session.cancel(); });
        return true;
      },
      up_to(-1));  // without a limit
  other.join();
  CHECK(generation.finish == H2O_FINISH_CANCELLED);
  CHECK(n_pieces >= 1);
  h2o_generation next = H2O_GENERATION;
  streamed(session, "", up_to(3), &next);  // the cancelled stream has ended
  CHECK(next.n_generated == 3);
}

TEST_CASE("a cancelled prompt is processed by the next call") {
  const api::Model model = load_model();
  h2o_session_options options = with_budget(8);
  options.n_batch = 1;
  api::Session cancelled = open_session(model, options), untouched = open_session(model, options);
  const std::vector<int32_t> tokens(2000, 5);

  std::atomic<bool> started = false, ended = false;
  std::thread other([&] {
    while (!ended) {
      cancelled.cancel();
      started = true;
    }
  });
  while (!started) std::this_thread::yield();
  const h2o_status status = h2o_feed(cancelled.handle(), tokens.data(), tokens.size());
  ended = true;
  other.join();
  CHECK(status == H2O_CANCELLED);
  CHECK(cancelled.stats().n_tokens == 2000);
  CHECK(cancelled.stats().n_read < 2000);
  untouched.feed(tokens);
  // One more cancel may have come after the call had ended.
  const float* logits = nullptr;
  int32_t n_vocab = 0;
  h2o_logits(cancelled.handle(), &logits, &n_vocab);
  CHECK(cancelled.sample() == untouched.sample());
  CHECK(cancelled.stats().n_read == 2000);
  CHECK(cancelled.save() == untouched.save());
}

TEST_CASE("a cancel between two calls ends the next one, and only that") {
  const api::Model model = load_model();
  api::Session session = open_session(model, with_budget(8));
  int32_t token = -7;
  h2o_generation generation = H2O_GENERATION;

  session.cancel();
  CHECK(streamed(session, "The old man", up_to(5), &generation) == "");
  CHECK(generation.finish == H2O_FINISH_CANCELLED);
  CHECK(generation.n_generated == 0);
  CHECK(session.stats().n_read == 0);
  CHECK(session.stats().n_tokens > 0);
  streamed(session, "", up_to(5), &generation);
  CHECK(generation.finish == H2O_FINISH_LENGTH);
  CHECK(generation.n_generated == 5);

  session.cancel();
  session.cancel();  // these two are merged
  CHECK(h2o_sample(session.handle(), &token) == H2O_CANCELLED);
  CHECK(token == -7);
  CHECK(h2o_sample(session.handle(), &token) == H2O_OK);
  session.cancel();
  CHECK(session.stats().n_tokens == static_cast<int32_t>(session.tokens().size()));
  CHECK(h2o_decode(session.handle(), token) == H2O_CANCELLED);
  CHECK(session.tokens().back() == token);
  const int32_t n_tokens = session.stats().n_tokens;
  CHECK(session.stats().n_read == n_tokens - 1);
  CHECK(h2o_decode(session.handle(), token) == H2O_OK);
  CHECK(session.stats().n_read == n_tokens + 1);

  session.cancel();
  session.reset();  // clears it
  streamed(session, "The old man", up_to(5), &generation);
  CHECK(generation.n_generated == 5);

  session.cancel();
  session.clear_cancel();
  streamed(session, "", up_to(5), &generation);
  CHECK(generation.n_generated == 5);

  // A late cancel of a stream does not affect the next one.
  session.stream(" and", [&](std::string_view) { return session.cancel(), true; }, up_to(1));
  streamed(session, "", up_to(5), &generation);
  CHECK(generation.n_generated == 5);
}

TEST_CASE("sessions are opened, cancelled and freed while others work") {
  constexpr int kSessions = 3;
  std::optional<api::Model> model(load_model(kRotaryModel, 2));
  std::vector<std::thread> threads;
  std::atomic<int> n_streams = 0;
  for (int i = 0; i < kSessions; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 4; ++round) {
        // The model may be busy in another thread's call.
        h2o_session_options options = with_budget(8);
        h2o_session* session = nullptr;
        while (h2o_session_open(model->handle(), &options, &session) == H2O_BUSY) {
          CHECK(h2o_session_free(session) == H2O_OK);
        }
        std::atomic<bool> started = false;
        std::thread other([&] {
          while (!started) std::this_thread::yield();
          h2o_cancel(session);
          CHECK(h2o_session_free(session) == H2O_BUSY);
          h2o_session_stats stats = H2O_SESSION_STATS;
          CHECK(h2o_stats(session, &stats) == H2O_BUSY);
        });
        const h2o_stream_options forever = up_to(-1);
        struct Call {
          std::atomic<bool>& started;
          std::thread& other;
        } call{started, other};
        const auto piece = [](void* user, const char*, size_t) -> int32_t {
          Call& call = *static_cast<Call*>(user);
          call.started = true;
          // So that the others find it busy.
          if (call.other.joinable()) call.other.join();
          return 0;
        };
        h2o_generation generation = H2O_GENERATION;
        CHECK(h2o_stream(session, "a", 1, &forever, piece, &call, &generation) == H2O_OK);
        CHECK(generation.finish == H2O_FINISH_CANCELLED);
        n_streams += generation.n_generated > 0;
        CHECK(h2o_session_free(session) == H2O_OK);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(n_streams == 4 * kSessions);
}

TEST_CASE("a callback may query, but not modify") {
  const api::Model model = load_model();
  api::Session session = open_session(model, with_budget(8));
  h2o_session* handle = session.handle();
  int n_pieces = 0;
  const h2o_generation generation = session.stream(
      "The old man",
      [&](std::string_view) {
        CHECK(session.stats().n_tokens > 0);
        CHECK(!session.kept(0, 0).empty());
        CHECK(session.tokens().size() == static_cast<size_t>(session.stats().n_tokens));
        CHECK(h2o_reset(handle) == H2O_BUSY);
        CHECK(h2o_decode(handle, 5) == H2O_BUSY);
        CHECK(h2o_session_free(handle) == H2O_BUSY);
        std::thread([&] {
          h2o_session_stats stats = H2O_SESSION_STATS;
          CHECK(h2o_stats(handle, &stats) == H2O_BUSY);
        }).join();
        return ++n_pieces < 3;
      },
      up_to(-1));
  CHECK(generation.finish == H2O_FINISH_CANCELLED);
  CHECK(n_pieces == 3);
  session.reset();
}

TEST_CASE("an exception in a callback ends the stream and does not cross the C API") {
  const api::Model model = load_model();
  api::Session session = open_session(model, with_budget(8));
  const auto throws = [](void*, const char*, size_t) -> int32_t {
    throw std::runtime_error("mine");
  };
  CHECK(h2o_stream(session.handle(), "The old man", 11, nullptr, throws, nullptr, nullptr) ==
        H2O_INTERNAL_ERROR);
  CHECK(std::string_view(h2o_session_error(session.handle())) == "mine");
  h2o_generation next = H2O_GENERATION;
  streamed(session, "", up_to(5), &next);
  CHECK(next.n_generated == 5);
}

TEST_CASE("concurrent sessions of one model get the same output as alone") {
  const api::Model model = load_model(kTinyModel, 2);
  constexpr int kSessions = 4;
  std::vector<std::string> alone, together(kSessions);
  for (int i = 0; i < kSessions; ++i) {
    api::Session session = open_session(model, with_budget(16), i);
    alone.push_back(streamed(session, "The old man", up_to(30)));
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < kSessions; ++i) {
    api::Session session = open_session(model, with_budget(16), i);
    threads.emplace_back([&together, i, session = std::move(session)]() mutable {
      together[i] = streamed(session, "The old man", up_to(30));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(together == alone);
}

#ifdef __linux__
TEST_CASE("no thread is leaked, whichever handle is freed last") {
  const size_t before = n_threads();
  for (const bool model_first : {true, false}) {
    std::optional<api::Model> model(load_model(kTinyModel, 3));
    std::optional<api::Session> session(open_session(*model, with_budget(8)));
    streamed(*session, "The old man", up_to(5));
    CHECK(n_threads() >= 3);  // this one and two workers; `before` may count some that just ended
    if (model_first) model.reset();
    streamed(*session, "", up_to(5));
    session.reset();
    model.reset();
    wait_for_threads(before);
  }
}
#endif

}  // namespace
}  // namespace h2o
