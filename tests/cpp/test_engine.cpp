// The engine and threads: who leads and who follows, saving, cancelling, closing, and that nothing
// is lost or waits for ever. Run under ThreadSanitizer too.
#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <limits>
#include <semaphore>
#include <set>
#include <stdexcept>
#include <thread>

#include "engine_rig.h"

namespace h2o {
namespace {

// Random requests, with what they give alone.
struct Expected {
  Request request;
  Outcome outcome;
};

std::vector<Expected> expected_requests(const std::shared_ptr<Model>& model, uint64_t seed, int n) {
  Random random(seed);
  std::vector<Expected> all(n);
  for (Expected& one : all) {
    one.request = random_request(random);
    one.outcome = alone(model, one.request);
  }
  return all;
}

// Runs `body(i)` in n threads, and waits.
template <class Body>
void in_threads(int n, const Body& body) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back([&body, i] { body(i); });
}

// For ever "a".
Request endless() {
  Request request;
  request.prompt = {3, 4};
  request.max_tokens = kEndless;
  request.constraint = only_a();
  return request;
}

// A request the first token of which waits until it may go on.
struct Gate {
  std::counting_semaphore<> computing{0}, may_go_on{0};

  Request request() {
    Request request = endless();
    request.max_tokens = 3;
    request.constraint = [this, n = 0](auto tokens, std::span<uint32_t> allowed) mutable {
      only_a()(tokens, allowed);
      if (n++ > 0) return;
      computing.release();
      may_go_on.acquire();
    };
    return request;
  }
};

TEST_CASE("threads with a stream each get what they get alone") {
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

TEST_CASE("streams of one thread go on together with fewer sequences, and the pieces are theirs") {
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
        const std::optional<Piece> piece = engine->next(streams[i], go_on);
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
    while (const std::optional<Piece> piece = engine->next(stream, go_on)) {
      n_letters += static_cast<int>(piece->text.size());
    }
  });
  CHECK(n_letters == 200);
}

// Reads what a mailbox tells of, woken by nothing but its notifications.
TEST_CASE("a mailbox tells of every piece, admission and end") {
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
      if (found == index.end()) continue;  // which had ended before
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

TEST_CASE("a mailbox that is dropped with news in it is destroyed, and its generations are too") {
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
  Gate gate;
  Request first = gate.request();
  first.eager = true;
  const auto running = engine->submit(std::move(first));
  gate.computing.acquire();
  std::vector<int> order;  // of first tokens, which one thread at a time computes
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
  CHECK(!engine->wait_admitted(handles[1], 0, go_on));
  struct Interrupted {};
  CHECK_THROWS_AS(engine->wait_admitted(handles[1], -1, [] { throw Interrupted(); }), Interrupted);
  engine->cancel(handles[1]);  // outside
  CHECK(engine->wait_admitted(handles[1], 0, go_on));
  CHECK(handles[1]->progress().finish == Finish::cancelled);
  engine->cancel(handles[0]);  // in the queue, which has room for another one then
  CHECK(handles[2]->admitted());
  CHECK(!handles[3]->admitted());
  engine->set_max_queue(2);
  CHECK(handles[3]->admitted());
  CHECK(!handles[4]->admitted());
  gate.may_go_on.release();
  CHECK(engine->wait_admitted(handles[5], -1, go_on));
  for (const auto& handle : handles) finished(*engine, handle);
  CHECK(order == std::vector{2, 3, 4, 5});
  CHECK(finished(*engine, running).text == "aaa");
}

TEST_CASE("the engine's own thread hears of a queue that grows") {
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

TEST_CASE("cancelling from other threads at any time leaves the others as they are") {
  const auto model = rotary_model();
  const auto expected = expected_requests(model, 4, 48);
  const auto engine = make_engine(model, engine_options(1, 2));
  std::vector<Engine::Handle> handles;
  for (size_t i = 0; i < expected.size(); ++i) {
    Request request = expected[i].request;
    request.eager = i % 2 == 0;
    handles.push_back(engine->submit(std::move(request)));
  }
  in_threads(4, [&](int thread) {
    Random random(thread);
    for (size_t i = 0; i < handles.size(); ++i) {
      if (thread < 2) {
        if (i % 2 == static_cast<size_t>(thread)) finished(*engine, handles[i]);
      } else if (i % 4 == static_cast<size_t>(thread)) {
        for (int n = random.integer(0, 40); n > 0; --n) std::this_thread::yield();
        engine->cancel(handles[i]);
        engine->wait_ended(handles[i]);
      }
    }
  });
  for (size_t i = 0; i < handles.size(); ++i) {
    const Outcome got = outcome(*handles[i]);
    CHECK(got.finish != Finish::none);
    if (i % 4 < 2 || got.finish != Finish::cancelled) {
      CHECK(got == expected[i].outcome);
    } else {
      CHECK(expected[i].outcome.text.starts_with(got.text));
    }
  }
  CHECK(engine->stats().n_active == 0);
  CHECK(engine->stats().n_waiting == 0);
}

TEST_CASE("what is cancelled while another thread saves ends") {
  const auto engine = make_engine(rotary_model(), engine_options(3));
  const auto saved = engine->submit(endless());
  engine->next(saved, go_on);
  for (int i = 0; i < 300; ++i) {
    const auto stream = engine->submit(endless());
    engine->next(stream, go_on);
    std::latch both(2);
    std::jthread saving([&] {
      both.arrive_and_wait();
      for (int j = 0; j < 5; ++j) engine->save(saved, "", go_on);
    });
    both.arrive_and_wait();
    engine->cancel(stream);
    engine->wait_ended(stream);
    CHECK(stream->progress().finish == Finish::cancelled);
  }
}

TEST_CASE("saving gets its turn between the steps of the engine's own thread") {
  const auto engine = make_engine(rotary_model(), engine_options(2));
  Request request = endless();
  request.eager = true;
  const auto generation = engine->submit(std::move(request));
  engine->next(generation, go_on);
  size_t n_bytes = 0;
  for (int i = 0; i < 50; ++i) n_bytes += engine->save(generation, "", go_on).size();
  CHECK(n_bytes > 0);
  engine->cancel_group(0);
  CHECK(generation->progress().finish == Finish::cancelled);
}

TEST_CASE("what begins in the step that is being computed is cancelled too") {
  const auto engine = make_engine(rotary_model(), engine_options(1));
  for (const bool closes : {false, true}) {
    Gate gate;
    Request request = gate.request();
    request.prompt = {3};
    request.max_tokens = kEndless;
    request.eager = true;
    const auto generation = engine->submit(std::move(request));
    gate.computing.acquire();  // in its first step
    std::jthread cancelling([&] { closes ? engine->close() : engine->cancel_group(0); });
    while (closes && !engine->closed()) std::this_thread::yield();
    gate.may_go_on.release();
    cancelling.join();
    engine->wait_ended(generation);
    CHECK(generation->progress().finish == Finish::cancelled);
    CHECK(engine->stats().n_active == 0);
  }
}

// Goes on from a snapshot of a generation, with the tokens that it has left.
std::string continued(Engine& engine, const std::vector<std::byte>& bytes, Request request,
                      const std::string& note) {
  const SnapshotText text = open_snapshot(bytes).text;
  CHECK(text.note == note);
  if (request.max_tokens) {
    *request.max_tokens -= static_cast<int32_t>(text.tokens.size() - request.prompt.size());
    CHECK(*request.max_tokens > 0);
  }
  request.after = {.bytes = bytes};
  request.prompt.clear();
  request.seeded = false;
  return finished(engine, engine.submit(std::move(request))).text;
}

TEST_CASE("a text saved at any piece goes on as it would have") {
  const auto model = rotary_model();
  const auto expected = expected_requests(model, 5, 60);
  int n_saved = 0, n_held = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const Request& request = expected[i].request;
    const auto engine = make_engine(model, engine_options(2));
    const auto stream = engine->submit(request);
    while (engine->next(stream, go_on)) {
      if (stream->progress().finish != Finish::none) continue;
      const auto bytes = engine->save(stream, "1", go_on);
      const SnapshotText text = open_snapshot(bytes).text;
      ++n_saved;
      n_held += !text.held_text.empty() || !text.held_bytes.empty();
      const auto other = make_engine(model, engine_options(1));
      CHECK(stream->text_read() + continued(*other, bytes, request, "1") ==
            expected[i].outcome.text);
    }
    CHECK(outcome(*stream) == expected[i].outcome);  // saving does it no harm
  }
  CHECK(n_saved > 100);
  CHECK(n_held > 10);
}

TEST_CASE("halves of characters and of stop strings go on after a snapshot") {
  const auto model = rotary_model();
  const LetterVocabulary& v = LetterVocabulary::get();
  Request request;
  request.prompt = {3};
  request.stop = {"a🦙a", "🦙é", "bb🦙bb"};
  const std::vector<int32_t> script =
      v.tokens({"a", "ðŁ¦Ļ", "b", "ð", "Ł", "¦", "Ļ", "aÃ",   "©b", "b", "b",    "aðŁ", "¦",
                "Ļ", "ð",    "b", "Ã", "a", "b", "b", "ðŁ¦Ļ", "b",  "a", "ðŁ¦Ļ", "aðŁ"});
  request.constraint = scripted(script, 1);
  const std::string whole = alone(model, request).text;
  CHECK(whole == "a🦙b🦙aébbba🦙\ufffdb\ufffdabb🦙b");
  // Eager: the pieces pile up, nothing has been taken, and all of it is held.
  for (const size_t n_computed : {2, 4, 5, 7, 9, 13, 16, 20, 22}) {
    const auto engine = make_engine(model, engine_options(2));
    Request eager = request;
    eager.eager = true;
    std::binary_semaphore computing{0}, may_go_on{0};
    eager.constraint = [&](std::span<const int32_t> tokens, std::span<uint32_t> allowed) {
      if (tokens.size() == n_computed) {
        computing.release();
        may_go_on.acquire();
      }
      scripted(script, 1)(tokens, allowed);
    };
    const auto generation = engine->submit(std::move(eager));
    computing.acquire();
    bool waits = false;  // to save after this step
    const auto bytes = engine->save(generation, "", [&] {
      if (!std::exchange(waits, true)) may_go_on.release();
    });
    CHECK(open_snapshot(bytes).text.tokens.size() == n_computed + 1);
    const auto other = make_engine(model, engine_options(1));
    CHECK(continued(*other, bytes, request, "") == whole);
    CHECK(finished(*engine, generation).text == whole);
  }
}

TEST_CASE("closing ends everything, in every thread") {
  const auto model = rotary_model();
  for (int round = 0; round < 10; ++round) {
    const auto engine = make_engine(model, engine_options(1, 2));
    engine->set_max_queue(2);
    const auto mailbox = std::make_shared<Mailbox>();
    std::latch all(7);
    std::atomic<int> n_ended = 0;
    std::mutex mutex;
    std::vector<Engine::Handle> handles = {engine->submit(endless())};  // that nobody asks
    in_threads(7, [&](int thread) {
      all.arrive_and_wait();
      Random random(round * 7 + thread);
      if (thread >= 5) {  // two close it
        for (int n = random.integer(0, 40); n > 0; --n) std::this_thread::yield();
        engine->close();
        ++n_ended;
        return;
      }
      try {
        while (true) {
          Request request = endless();
          request.eager = thread == 0 || thread == 1;
          const auto generation = engine->submit(std::move(request));
          {
            const std::lock_guard lock(mutex);
            handles.push_back(generation);
          }
          if (thread == 1) engine->subscribe(generation, mailbox);
          if (thread == 0) engine->wait_admitted(generation, -1, go_on);
          for (int n = random.integer(1, 30); n > 0 && engine->next(generation, go_on); --n) {
            if (thread == 3) engine->save(generation, "", go_on);
          }
          if (thread == 4 || random.flip()) engine->cancel(generation);
          engine->stats();
          engine->last();
        }
      } catch (const std::runtime_error&) {  // it is closed
        ++n_ended;
      }
    });
    CHECK(n_ended == 7);
    CHECK(engine->closed());
    CHECK(engine->stats().n_active == 0);
    CHECK(engine->stats().n_waiting == 0);
    for (const auto& handle : handles) {
      engine->cancel(handle);
      CHECK(handle->progress().finish == Finish::cancelled);
      engine->wait_ended(handle);
    }
    CHECK_THROWS_WITH(engine->submit(endless()), "the engine is closed");
    CHECK_THROWS_WITH(engine->save(handles[0], "", go_on), "the engine is closed");
  }
}

TEST_CASE("what a request holds is dropped when it has ended, and may call the engine") {
  const auto engine = make_engine(rotary_model(), engine_options(2));
  int n_dropped = 0;
  const auto calling = [&](Request request) {
    const std::shared_ptr<void> owner(nullptr, [&](void*) {
      engine->stats();  // waits for ever if the lock is held
      ++n_dropped;
    });
    request.constraint = [owner](auto tokens, std::span<uint32_t> allowed) {
      only_a()(tokens, allowed);
    };
    return request;
  };
  Request request = endless();
  request.max_tokens = 2;
  const auto ended = engine->submit(calling(request));
  finished(*engine, ended);
  CHECK(n_dropped == 1);  // though there is a handle, and it is the last one
  const auto cancelled = engine->submit(calling(endless()));
  engine->next(cancelled, go_on);
  engine->cancel(cancelled);
  CHECK(n_dropped == 2);
  engine->submit(calling(endless()));  // which nobody wants
  CHECK(n_dropped == 3);
  Request eager = endless();
  eager.eager = true;
  engine->submit(calling(eager));
  engine->submit(calling(endless()));
  engine->close();
  CHECK(n_dropped == 5);
}

TEST_CASE("a callback may be the last that holds the engine") {
  std::binary_semaphore destroyed{0};
  const auto model = rotary_model();
  std::weak_ptr<Generation> weak;
  {
    const std::shared_ptr<Engine> engine(
        new Engine(model, LetterVocabulary::get().tokenizer(), engine_options(1)),
        [&](Engine* own) {
          delete own;
          destroyed.release();
        });
    Request request = endless();
    request.max_tokens = 30;
    request.eager = true;
    request.constraint = [engine](auto tokens, std::span<uint32_t> allowed) {
      only_a()(tokens, allowed);
    };
    engine->submit(std::move(request));
  }
  destroyed.acquire();  // by the engine's own thread
}

TEST_CASE("a callback that would wait for its own engine is refused") {
  const auto model = rotary_model();
  for (const bool eager : {false, true}) {  // in this thread, and in one of the engine
    const auto engine = make_engine(model, engine_options(1));
    engine->set_max_queue(1);
    Engine::Handle own;
    std::vector<std::string> messages;
    const auto refused = [&](const auto& body) {
      try {
        body();
        messages.emplace_back("went through");
      } catch (const std::runtime_error& error) {
        messages.emplace_back(error.what());
      }
    };
    Gate gate;
    Request request = endless();
    request.eager = eager;
    request.max_tokens = 2;
    request.constraint = [&, n = 0](auto tokens, std::span<uint32_t> allowed) mutable {
      only_a()(tokens, allowed);
      if (eager) gate.may_go_on.acquire();
      if (n++ > 0) return;
      CHECK(engine->in_callback());
      Request eager_one = endless();
      eager_one.eager = true;
      const auto queued = engine->submit(eager_one), outside = engine->submit(eager_one);
      refused([&] { engine->next(queued, go_on); });
      refused([&] { engine->next(own, go_on); });
      refused([&] { engine->save(own, "", go_on); });
      refused([&] { engine->restore({}, go_on); });
      refused([&] { engine->wait_ended(own); });
      refused([&] { engine->wait_admitted(outside, -1, go_on); });
      CHECK(!engine->wait_admitted(outside, 0, go_on));
      engine->cancel(queued);
      engine->cancel(outside);
      engine->wait_ended(queued);
      CHECK(engine->stats().n_waiting == 0);
    };
    own = engine->submit(std::move(request));
    if (eager) gate.may_go_on.release(2);
    CHECK(finished(*engine, own).text == "aa");
    CHECK(!engine->in_callback());
    REQUIRE(messages.size() == 6);
    for (const std::string& message : messages) {
      CHECK(message.starts_with("a constraint called the engine that is waiting for it"));
    }
  }
}

TEST_CASE("a callback may close its engine, which then ends what it computes") {
  const auto model = rotary_model();
  for (const bool eager : {false, true}) {
    const auto engine = make_engine(model, engine_options(1));
    Request request = endless();
    request.eager = eager;
    request.constraint = [&](auto tokens, std::span<uint32_t> allowed) {
      only_a()(tokens, allowed);
      engine->cancel_group(0);
      engine->close();
    };
    const auto generation = engine->submit(std::move(request));
    engine->wait_admitted(generation, -1, go_on);
    while (engine->next(generation, go_on)) {
    }
    CHECK(generation->progress().finish == Finish::cancelled);
    CHECK(engine->closed());
    engine->close();
    CHECK_THROWS_WITH(engine->submit(endless()), "the engine is closed");
  }
}

TEST_CASE("a wait may be as long as numbers are, and sleeps") {
  Gate gate;  // which the engine still calls when it is closed
  const auto engine = make_engine(rotary_model(), engine_options(1));
  engine->set_max_queue(1);
  Request request = gate.request();
  request.eager = true;
  engine->submit(request);
  gate.computing.acquire();
  engine->submit(request);
  const auto outside = engine->submit(request);
  for (const double seconds : {1e300, std::numeric_limits<double>::infinity()}) {
    struct Enough {};
    const auto begin = std::chrono::steady_clock::now();
    const auto between = [n = 0]() mutable {
      if (++n == 5) throw Enough();
    };
    CHECK_THROWS_AS(engine->wait_admitted(outside, seconds, between), Enough);
    // Five tenths of a second; less if it was woken, and next to nothing if it never slept.
    CHECK(std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(100));
  }
  gate.may_go_on.release(3);
}

TEST_CASE("a generation that is left in the queue gets in line again") {
  const auto engine = make_engine(rotary_model(), engine_options(1));
  Gate gate;
  Request first = gate.request();
  first.eager = true;
  const auto running = engine->submit(std::move(first));
  gate.computing.acquire();
  Request request = endless();
  request.max_tokens = 2;
  const auto stream = engine->submit(std::move(request));
  begin_and_leave(*engine, stream);
  CHECK(!stream->began());
  CHECK(engine->stats().n_waiting == 0);
  gate.may_go_on.release();
  CHECK(finished(*engine, stream).text == "aa");
  CHECK(finished(*engine, running).text == "aaa");
}

TEST_CASE("what has not begun, or is no longer there, cannot be saved") {
  const auto engine = make_engine(rotary_model(), engine_options(1));
  const auto first = engine->submit(endless()), second = engine->submit(endless());
  CHECK_THROWS_WITH(engine->save(first, "", go_on),
                    "nothing has been read yet: ask for a piece of the text first");
  engine->next(first, go_on);
  engine->next(second, go_on);  // the first is parked
  CHECK(open_snapshot(engine->save(first, "", go_on)).text.tokens == first->tokens());
  engine->cancel(second);
  CHECK(open_snapshot(engine->save(second, "", go_on)).text.tokens == second->tokens());
  engine->next(first, go_on);
  engine->next(first, go_on);
  CHECK_THROWS_WITH(engine->save(second, "", go_on),
                    "the cache does not hold this sequence any more");
  CHECK(engine->last() == second);
  CHECK(engine->last_sequence() == 0);
}

}  // namespace
}  // namespace h2o
