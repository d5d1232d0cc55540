// The engine with threads: streams, mailboxes and the queue give each request the same output as
// alone. Also run under ThreadSanitizer.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <semaphore>
#include <set>
#include <thread>

#include "engine_rig.h"

namespace h2o {
namespace {

TEST_CASE("threads with a stream each get the same output as alone") {
  const auto model = rotary_model();
  const auto expected = expected_requests(model, 1, 32);
  for (const int32_t n_sequences : {1, 2, 4}) {
    const auto engine = make_engine(model, engine_options(1, n_sequences));
    std::vector<Outcome> outcomes(expected.size());
    in_threads(4, [&](int thread) {
      for (size_t i = thread; i < expected.size(); i += 4) {
        Request request = expected[i].request;
        request.eager = i % 3 == 0;
        outcomes[i] = finished(*engine, engine->submit(std::move(request)));
      }
    });
    for (size_t i = 0; i < expected.size(); ++i) CHECK(outcomes[i] == expected[i].outcome);
    CHECK(engine->stats().n_active == 0);
    CHECK(engine->stats().n_waiting == 0);
  }
}

TEST_CASE("streams of one thread share fewer sequences and get their own pieces") {
  const auto model = rotary_model();
  const auto expected = expected_requests(model, 2, 6);
  for (const int32_t n_sequences : {1, 2, 4}) {
    const auto engine = make_engine(model, engine_options(n_sequences));
    std::vector<Engine::Handle> streams;
    for (const Expected& one : expected) streams.push_back(engine->submit(one.request));
    std::vector<std::string> texts(streams.size());
    std::vector<int32_t> n_tokens(streams.size());
    for (bool any = true; any;) {
      any = false;
      for (size_t i = 0; i < streams.size(); ++i) {
        const std::optional<Piece> piece = engine->next(streams[i], no_interrupt);
        if (!piece) continue;
        any = true;
        CHECK(!piece->text.empty());
        CHECK(piece->n_tokens >= n_tokens[i]);
        n_tokens[i] = piece->n_tokens;
        texts[i] += piece->text;
        CHECK(streams[i]->text_read() == texts[i]);
        CHECK(streams[i]->n_tokens_read() >= piece->n_tokens);
      }
    }
    for (size_t i = 0; i < streams.size(); ++i) {
      CHECK(outcome(*streams[i]) == expected[i].outcome);
      CHECK(texts[i] == expected[i].outcome.text);
    }
  }
}

TEST_CASE("two threads may wait for one stream") {
  const auto model = rotary_model();
  const auto engine = make_engine(model, engine_options(1));
  Request request = endless();
  request.max_tokens = 200;
  const auto stream = engine->submit(std::move(request));
  std::atomic<int> n_letters = 0;
  in_threads(3, [&](int) {
    while (const std::optional<Piece> piece = engine->next(stream, no_interrupt)) {
      n_letters += static_cast<int>(piece->text.size());
    }
  });
  CHECK(n_letters == 200);
}

// Reads the generations in a mailbox, woken only by its notifications.

TEST_CASE("a mailbox receives every piece, admission and end") {
  const auto model = rotary_model();
  const auto expected = expected_requests(model, 3, 40);
  const auto engine = make_engine(model, engine_options(1, 3));
  engine->set_max_queue(2);
  std::counting_semaphore<> notified{0};
  const auto mailbox = std::make_shared<Mailbox>([&] { notified.release(); });
  std::map<Generation*, size_t> index;
  std::vector<Engine::Handle> handles;
  std::vector<std::string> texts(expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    Request request = expected[i].request;
    request.eager = true;
    handles.push_back(engine->submit(std::move(request)));
    index[handles.back().get()] = i;
    engine->subscribe(handles.back(), mailbox);
  }
  std::set<Generation*> admitted;
  for (size_t n_ended = 0; n_ended < expected.size();) {
    notified.acquire();
    for (const auto& generation : mailbox->take()) {
      if (generation->admitted()) admitted.insert(generation.get());
      const auto found = index.find(generation.get());
      if (found == index.end()) continue;  // ended before
      const bool ended = generation->progress().finish != Finish::none;
      if (const auto pieces = engine->poll(generation)) texts[found->second] += pieces->text;
      if (!ended) continue;
      index.erase(found);
      ++n_ended;
    }
  }
  CHECK(admitted.size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(outcome(*handles[i]) == expected[i].outcome);
    CHECK(texts[i] == expected[i].outcome.text);
  }
}

TEST_CASE("a mailbox does not keep generations, and is silent once it is closed") {
  const auto engine = make_engine(rotary_model(), engine_options(1));
  int n_notified = 0;
  const auto mailbox = std::make_shared<Mailbox>([&] { ++n_notified; });
  const auto ended = [&] {
    Request request = endless();
    request.max_tokens = 2;
    const auto generation = engine->submit(std::move(request));
    engine->subscribe(generation, mailbox);
    finished(*engine, generation);
    return generation;
  };
  std::weak_ptr<Generation> dropped = ended();
  const auto kept = ended();  // and now `dropped` is not the engine's last one
  CHECK(dropped.expired());
  CHECK(n_notified == 1);
  const auto news = mailbox->take();
  CHECK(!news.empty());
  for (const auto& one : news) CHECK(one == kept);
  mailbox->close();
  ended();
  CHECK(n_notified == 1);
}

TEST_CASE("releasing a mailbox with events destroys it and its generations") {
  const auto model = rotary_model();
  const auto engine = make_engine(model, engine_options(1));
  std::weak_ptr<Mailbox> mailbox;
  std::weak_ptr<Generation> generation;
  {
    const auto own = std::make_shared<Mailbox>();
    Request request = endless();
    request.max_tokens = 2;
    const auto handle = engine->submit(std::move(request));
    engine->subscribe(handle, own);
    finished(*engine, handle);
    mailbox = own;
    generation = handle;
  }
  CHECK(mailbox.expired());
  Request other = endless();
  other.max_tokens = 1;
  finished(*engine, engine->submit(std::move(other)));  // now it is not the last one either
  CHECK(generation.expired());
}

TEST_CASE("eager requests are admitted in order, as many as the queue may hold") {
  const auto model = rotary_model();
  const auto engine = make_engine(model, engine_options(1));
  engine->set_max_queue(1);
  PausedRequest paused;
  Request first = paused.request();
  first.eager = true;
  const auto running = engine->submit(std::move(first));
  paused.computing.acquire();
  std::vector<int> order;  // of first tokens, which are computed by one thread at a time
  std::vector<Engine::Handle> handles;
  for (int i = 0; i < 6; ++i) {
    Request request = endless();
    request.max_tokens = 2;
    request.eager = true;
    request.constraint = [&order, i](auto tokens, std::span<uint32_t> allowed) {
      only_a()(tokens, allowed);
      if (tokens.size() == 2) order.push_back(i);
    };
    handles.push_back(engine->submit(std::move(request)));
  }
  CHECK(handles[0]->admitted());
  for (int i = 1; i < 6; ++i) CHECK(!handles[i]->admitted());
  CHECK(engine->stats().n_waiting == 6);
  CHECK(!engine->wait_admitted(handles[1], 0, no_interrupt));
  struct Interrupted {};
  CHECK_THROWS_AS(engine->wait_admitted(handles[1], -1, [] { throw Interrupted(); }), Interrupted);
  engine->cancel(handles[1]);  // waiting for admission
  CHECK(engine->wait_admitted(handles[1], 0, no_interrupt));
  CHECK(handles[1]->progress().finish == Finish::cancelled);
  engine->cancel(handles[0]);  // in the queue, which can then admit another one
  CHECK(handles[2]->admitted());
  CHECK(!handles[3]->admitted());
  engine->set_max_queue(2);
  CHECK(handles[3]->admitted());
  CHECK(!handles[4]->admitted());
  paused.may_go_on.release();
  CHECK(engine->wait_admitted(handles[5], -1, no_interrupt));
  for (const auto& handle : handles) finished(*engine, handle);
  CHECK(order == std::vector{2, 3, 4, 5});
  CHECK(finished(*engine, running).text == "aaa");
}

TEST_CASE("the engine's own thread is notified of a larger queue") {
  const auto engine = make_engine(rotary_model(), engine_options(1));
  engine->set_max_queue(0);
  std::counting_semaphore<> notified{0};
  const auto mailbox = std::make_shared<Mailbox>([&] { notified.release(); });
  for (int i = 0; i < 20; ++i) {
    Request request = endless();
    request.max_tokens = 1;
    request.eager = true;
    const auto generation = engine->submit(std::move(request));
    engine->subscribe(generation, mailbox);
    CHECK(!generation->admitted());
    engine->set_max_queue(1);
    while (generation->progress().finish == Finish::none) {
      notified.acquire();
      mailbox->take();
    }
    engine->set_max_queue(0);
  }
}

TEST_CASE("a wait accepts any timeout, and sleeps") {
  PausedRequest paused;  // still called by the engine when it is closed
  const auto engine = make_engine(rotary_model(), engine_options(1));
  engine->set_max_queue(1);
  Request request = paused.request();
  request.eager = true;
  engine->submit(request);
  paused.computing.acquire();
  engine->submit(request);
  const auto outside = engine->submit(request);
  for (const double seconds : {1e300, std::numeric_limits<double>::infinity()}) {
    struct Enough {};
    const auto begin = std::chrono::steady_clock::now();
    const auto between = [n = 0]() mutable {
      if (++n == 5) throw Enough();
    };
    CHECK_THROWS_AS(engine->wait_admitted(outside, seconds, between), Enough);
    // 500 ms; less if it was woken, and almost nothing if it never slept.
    CHECK(std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(100));
  }
  paused.may_go_on.release(3);
}

TEST_CASE("a generation abandoned in the queue is queued again") {
  const auto engine = make_engine(rotary_model(), engine_options(1));
  PausedRequest paused;
  Request first = paused.request();
  first.eager = true;
  const auto running = engine->submit(std::move(first));
  paused.computing.acquire();
  Request request = endless();
  request.max_tokens = 2;
  const auto stream = engine->submit(std::move(request));
  start_and_abandon(*engine, stream);
  CHECK(!stream->began());
  CHECK(engine->stats().n_waiting == 0);
  paused.may_go_on.release();
  CHECK(finished(*engine, stream).text == "aa");
  CHECK(finished(*engine, running).text == "aaa");
}

}  // namespace
}  // namespace h2o
