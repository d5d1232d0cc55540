// Snapshots of an engine's generations: a restored generation continues as if it had not stopped.
// Also run under ThreadSanitizer.
#include <doctest/doctest.h>

#include <latch>
#include <thread>
#include <utility>

#include "engine_rig.h"

namespace h2o {
namespace {

TEST_CASE("a generation cancelled while another thread saves ends") {
  const auto engine = make_engine(rotary_model(), engine_options(3));
  const auto saved = engine->submit(endless());
  engine->next(saved, no_interrupt);
  for (int i = 0; i < 300; ++i) {
    const auto stream = engine->submit(endless());
    engine->next(stream, no_interrupt);
    std::latch both(2);
    std::jthread saving([&] {
      both.arrive_and_wait();
      for (int j = 0; j < 5; ++j) engine->save(saved, "", no_interrupt);
    });
    both.arrive_and_wait();
    engine->cancel(stream);
    engine->wait_ended(stream);
    CHECK(stream->progress().finish == Finish::cancelled);
  }
}

TEST_CASE("saving is not starved by the engine's own thread") {
  const auto engine = make_engine(rotary_model(), engine_options(2));
  Request request = endless();
  request.eager = true;
  const auto generation = engine->submit(std::move(request));
  engine->next(generation, no_interrupt);
  size_t n_bytes = 0;
  for (int i = 0; i < 50; ++i) n_bytes += engine->save(generation, "", no_interrupt).size();
  CHECK(n_bytes > 0);
  engine->cancel_group(0);
  CHECK(generation->progress().finish == Finish::cancelled);
}

// Continues from a snapshot of a generation, with its remaining tokens.
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

TEST_CASE("a generation saved at any piece continues identically") {
  const auto model = rotary_model();
  const auto expected = expected_requests(model, 5, 60);
  int n_saved = 0, n_held = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const Request& request = expected[i].request;
    const auto engine = make_engine(model, engine_options(2));
    const auto stream = engine->submit(request);
    while (engine->next(stream, no_interrupt)) {
      if (stream->progress().finish != Finish::none) continue;
      const auto bytes = engine->save(stream, "1", no_interrupt);
      const SnapshotText text = open_snapshot(bytes).text;
      ++n_saved;
      n_held += !text.held_text.empty() || !text.held_bytes.empty();
      const auto other = make_engine(model, engine_options(1));
      CHECK(stream->text_read() + continued(*other, bytes, request, "1") ==
            expected[i].outcome.text);
    }
    CHECK(outcome(*stream) == expected[i].outcome);  // saving does not affect it
  }
  CHECK(n_saved > 100);
  CHECK(n_held > 10);
}

TEST_CASE("partial characters and stop strings continue after a snapshot") {
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
  // Eager: pieces accumulate, none has been read, and all text is held back.
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
    bool waits = false;  // a thread waits to save after this step
    const auto bytes = engine->save(generation, "", [&] {
      if (!std::exchange(waits, true)) may_go_on.release();
    });
    CHECK(open_snapshot(bytes).text.tokens.size() == n_computed + 1);
    const auto other = make_engine(model, engine_options(1));
    CHECK(continued(*other, bytes, request, "") == whole);
    CHECK(finished(*engine, generation).text == whole);
  }
}

TEST_CASE("a generation that has not started, or is no longer cached, cannot be saved") {
  const auto engine = make_engine(rotary_model(), engine_options(1));
  const auto first = engine->submit(endless()), second = engine->submit(endless());
  CHECK_THROWS_WITH(engine->save(first, "", no_interrupt),
                    "nothing has been read yet: ask for a piece of the text first");
  engine->next(first, no_interrupt);
  engine->next(second, no_interrupt);  // the first is parked
  CHECK(open_snapshot(engine->save(first, "", no_interrupt)).text.tokens == first->tokens());
  engine->cancel(second);
  CHECK(open_snapshot(engine->save(second, "", no_interrupt)).text.tokens == second->tokens());
  engine->next(first, no_interrupt);
  engine->next(first, no_interrupt);
  CHECK_THROWS_WITH(engine->save(second, "", no_interrupt),
                    "the cache does not hold this sequence any more");
  CHECK(engine->last() == second);
  CHECK(engine->last_sequence() == 0);
}

}  // namespace
}  // namespace h2o
