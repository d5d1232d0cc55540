// Cancellation, closing and callbacks of an engine: everything ends, nothing is lost, and nothing
// deadlocks. Also run under ThreadSanitizer.
#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "allocations.h"
#include "engine_rig.h"

namespace h2o {
namespace {

TEST_CASE("cancelling from other threads at any time does not affect other generations") {
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

TEST_CASE("generations that start in the current step are cancelled too") {
  const auto engine = make_engine(rotary_model(), engine_options(1));
  for (const bool closes : {false, true}) {
    PausedRequest paused;
    Request request = paused.request();
    request.prompt = {3};
    request.max_tokens = kEndless;
    request.eager = true;
    const auto generation = engine->submit(std::move(request));
    paused.computing.acquire();  // in its first step
    std::jthread cancelling([&] { closes ? engine->close() : engine->cancel_group(0); });
    while (closes && !engine->closed()) std::this_thread::yield();
    paused.may_go_on.release();
    cancelling.join();
    engine->wait_ended(generation);
    CHECK(generation->progress().finish == Finish::cancelled);
    CHECK(engine->stats().n_active == 0);
  }
}

TEST_CASE("closing ends all generations, on every thread") {
  const auto model = rotary_model();
  for (int round = 0; round < 10; ++round) {
    const auto engine = make_engine(model, engine_options(1, 2));
    engine->set_max_queue(2);
    const auto mailbox = std::make_shared<Mailbox>();
    std::latch all(7);
    std::atomic<int> n_ended = 0;
    std::mutex mutex;
    std::vector<Engine::Handle> handles = {engine->submit(endless())};  // not read by any thread
    in_threads(7, [&](int thread) {
      all.arrive_and_wait();
      Random random(round * 7 + thread);
      if (thread >= 5) {  // two threads close it
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
          if (thread == 0) engine->wait_admitted(generation, -1, no_interrupt);
          for (int n = random.integer(1, 30); n > 0 && engine->next(generation, no_interrupt);
               --n) {
            if (thread == 3) engine->save(generation, "", no_interrupt);
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
    CHECK_THROWS_WITH(engine->save(handles[0], "", no_interrupt), "the engine is closed");
  }
}

TEST_CASE(
    "a request's callbacks are released at its end, and their destructors may call the engine") {
  const auto engine = make_engine(rotary_model(), engine_options(2));
  int n_dropped = 0;
  const auto calling = [&](Request request) {
    const std::shared_ptr<void> owner(nullptr, [&](void*) {
      engine->stats();  // deadlocks if the lock is held
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
  CHECK(n_dropped == 1);  // even though its handle still exists, and it is the last one
  const auto cancelled = engine->submit(calling(endless()));
  engine->next(cancelled, no_interrupt);
  engine->cancel(cancelled);
  CHECK(n_dropped == 2);
  engine->submit(calling(endless()));  // not read by any thread
  CHECK(n_dropped == 3);
  Request grouped = endless();
  grouped.group = 7;
  engine->next(engine->submit(calling(std::move(grouped))), no_interrupt);
  CHECK(n_dropped == 3);
  engine->cancel_group(7);
  CHECK(n_dropped == 4);
  Request eager = endless();
  eager.eager = true;
  engine->submit(calling(eager));
  engine->submit(calling(endless()));
  engine->close();
  CHECK(n_dropped == 6);
}

// Python's lock, for instance, which a thread may hold that reads a generation.
TEST_CASE("an engine is destroyed without memory") {
  auto engine = make_engine(rotary_model(), engine_options(1, 2));
  engine->set_max_queue(1);
  std::vector<Engine::Handle> generations;
  for (int i = 0; i < 6; ++i) {
    Request request = endless();
    request.eager = i % 2 == 0;
    generations.push_back(engine->submit(std::move(request)));
    // Before two eager ones have both sequences forever.
    if (i == 1) engine->next(generations[1], no_interrupt);
  }
  {
    const FailingAllocation failing(1, false);
    engine.reset();
  }
  for (const Engine::Handle& generation : generations) {
    const bool submitted = generation->request().eager || generation == generations[1];
    CHECK(generation->progress().finish == (submitted ? Finish::cancelled : Finish::none));
    CHECK((generation->request().constraint == nullptr) == submitted);
  }
}

TEST_CASE("an engine is closed without the lock that readers of its generations need") {
  bool is_destroyed = false;
  Engine::Handle generation;
  std::shared_ptr<Model> owner = rotary_model();
  std::shared_ptr<Model> model(owner.get(), [&, owner](const Model*) {
    is_destroyed = generation->progress().finish == Finish::cancelled;
  });
  owner.reset();
  const auto engine = make_engine(model, engine_options(1));
  model.reset();
  generation = engine->submit(endless());
  CHECK(engine->next(generation, no_interrupt));
  engine->close();
  CHECK(is_destroyed);
}

TEST_CASE("a callback may hold the last reference to the engine") {
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
  destroyed.acquire();  // on the engine's own thread
}

TEST_CASE("a callback must not wait for its own engine") {
  const auto model = rotary_model();
  for (const bool eager : {false, true}) {  // on this thread, and on the engine's
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
    PausedRequest paused;
    Request request = endless();
    request.eager = eager;
    request.max_tokens = 2;
    request.constraint = [&, n = 0](auto tokens, std::span<uint32_t> allowed) mutable {
      only_a()(tokens, allowed);
      if (eager) paused.may_go_on.acquire();
      if (n++ > 0) return;
      CHECK(engine->in_callback());
      Request eager_one = endless();
      eager_one.eager = true;
      const auto queued = engine->submit(eager_one), outside = engine->submit(eager_one);
      refused([&] { engine->next(queued, no_interrupt); });
      refused([&] { engine->next(own, no_interrupt); });
      refused([&] { engine->save(own, "", no_interrupt); });
      refused([&] { engine->restore({}, no_interrupt); });
      refused([&] { engine->wait_ended(own); });
      refused([&] { engine->wait_admitted(outside, -1, no_interrupt); });
      CHECK(!engine->wait_admitted(outside, 0, no_interrupt));
      engine->cancel(queued);
      engine->cancel(outside);
      engine->wait_ended(queued);
      CHECK(engine->stats().n_waiting == 0);
    };
    own = engine->submit(std::move(request));
    if (eager) paused.may_go_on.release(2);
    CHECK(finished(*engine, own).text == "aa");
    CHECK(!engine->in_callback());
    REQUIRE(messages.size() == 6);
    for (const std::string& message : messages) {
      CHECK(message.starts_with("a constraint called the engine that is waiting for it"));
    }
  }
}

TEST_CASE("a callback may close its engine, which then ends its generations") {
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
    engine->wait_admitted(generation, -1, no_interrupt);
    while (engine->next(generation, no_interrupt)) {
    }
    CHECK(generation->progress().finish == Finish::cancelled);
    CHECK(engine->closed());
    engine->close();
    CHECK_THROWS_WITH(engine->submit(endless()), "the engine is closed");
  }
}

}  // namespace
}  // namespace h2o
