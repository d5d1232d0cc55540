// Continuous batching on one thread: which tokens are processed when, and that each generation
// gets, bit for bit, the output that it gets alone.
#include <doctest/doctest.h>

#include <functional>
#include <stdexcept>

#include "allocations.h"
#include "engine_rig.h"

namespace h2o {
namespace {

Request letters(int32_t n_prompt, int32_t max_tokens = 20) {
  Request request;
  request.prompt.assign(n_prompt, 3);
  request.max_tokens = max_tokens;
  request.constraint = only_a();
  return request;
}

// Requests a piece of each generation in turn, on one thread, until all have ended.
void zip(Engine& engine, const std::vector<Engine::Handle>& generations) {
  for (bool any = true; any;) {
    any = false;
    for (const Engine::Handle& generation : generations) {
      any = engine.next(generation, no_interrupt).has_value() || any;
    }
  }
}

TEST_CASE("decoding continues while a long prompt is processed in chunks") {
  const auto engine = make_engine(rotary_model(), engine_options(2));
  const auto writes = engine->submit(letters(3)), reads = engine->submit(letters(18));
  CHECK(engine->next(writes, no_interrupt)->text == "a");
  start_and_abandon(*engine, reads);
  CHECK(engine->session().tokens_seen(1) == 4);
  engine->next(writes, no_interrupt);  // the piece computed in the same step
  for (const int32_t seen : {8, 12, 16, 18, 18}) {
    CHECK(engine->next(writes, no_interrupt)->n_tokens > 0);
    CHECK(engine->session().tokens_seen(1) == seen);  // then it has a piece, and waits
  }
  CHECK(reads->progress().n_generated == 1);
}

TEST_CASE("prompts are processed in order of arrival, and a chunk that does not fit is postponed") {
  // Rows of a step: 4 of a prompt, and one for each of 3 others.
  const auto engine = make_engine(rotary_model(), engine_options(4));
  const auto writes = engine->submit(letters(1));
  const auto first = engine->submit(letters(14)), second = engine->submit(letters(11));
  const auto small = engine->submit(letters(6));
  CHECK(engine->next(writes, no_interrupt)->text == "a");
  for (const auto& one : {first, second, small}) start_and_abandon(*engine, one);
  // first: 4, 4, 4. second began beside a chunk and had to wait; the last of small, 2 tokens, too.
  const auto seen = [&] {
    std::vector<int32_t> out;
    for (const int32_t i : {1, 2, 3}) out.push_back(engine->session().tokens_seen(i));
    return out;
  };
  using Seen = std::vector<int32_t>;
  CHECK(seen() == Seen{12, 0, 0});
  engine->next(writes, no_interrupt);  // the piece computed in the same step
  engine->next(writes, no_interrupt);  // 1 + 2 + 4
  CHECK(seen() == Seen{14, 4, 0});
  engine->next(writes, no_interrupt);  // first has its piece and waits; 1 + 4, and 4 do not fit
  CHECK(seen() == Seen{14, 8, 0});
  engine->next(writes, no_interrupt);  // 1 + 3; 4 do not fit, though 3 would
  CHECK(seen() == Seen{14, 11, 0});
  engine->next(writes, no_interrupt);
  CHECK(seen() == Seen{14, 11, 4});
  engine->next(writes, no_interrupt);
  CHECK(seen() == Seen{14, 11, 6});
}

TEST_CASE("a small chunk shares a step with a large one of an earlier prompt") {
  const auto engine = make_engine(rotary_model(), engine_options(3));
  const auto first = engine->submit(letters(9)), second = engine->submit(letters(9));
  const auto small = engine->submit(letters(2));
  start_and_abandon(*engine, first);
  start_and_abandon(*engine, second);
  CHECK(engine->session().tokens_seen(0) == 8);
  CHECK(engine->session().tokens_seen(1) == 0);
  CHECK(engine->next(small, no_interrupt)->text == "a");  // 1 + 4; 2 do not fit; then 4 + 2
  CHECK(engine->session().tokens_seen(0) == 9);
  CHECK(engine->session().tokens_seen(1) == 8);
  CHECK(engine->session().tokens_seen(2) == 2);
}

// With these numbers of sequences at first and at most, batched output equals separate output.
void check_together(int32_t n_sequences, int32_t max_sequences, uint64_t seed) {
  const auto model = rotary_model();
  Random random(seed);
  int32_t most = 0;
  for (int round = 0; round < 12; ++round) {
    std::vector<Request> requests;
    for (int i = 0; i < 5; ++i) requests.push_back(random_request(random));
    const auto engine = make_engine(model, engine_options(n_sequences, max_sequences));
    std::vector<Engine::Handle> together;
    for (const Request& request : requests) {
      together.push_back(engine->submit(request));
    }
    zip(*engine, together);
    for (size_t i = 0; i < requests.size(); ++i) {
      CHECK(outcome(*together[i]) == alone(model, requests[i]));
    }
    CHECK(engine->stats().n_active == 0);
    most = std::max(most, engine->session().options().n_sequences);
  }
  CHECK(most == max_sequences);
}

TEST_CASE("batched generations get the same output as alone") { check_together(5, 5, 1); }

TEST_CASE("parked and resumed generations get the same output as alone") {
  check_together(1, 1, 2);
  check_together(2, 2, 3);
}

TEST_CASE("growing a cache preserves its content") {
  check_together(1, 4, 4);
  check_together(3, 4, 5);
}

TEST_CASE("log-probabilities do not depend on other generations") {
  const auto model = rotary_model();
  Random random(6);
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(random_request(random));
  const auto traced = [](Request request) {
    request.trace = std::make_shared<Trace>(TraceOptions{.n_top = 2, .prompt = true});
    return request;
  };
  const auto engine = make_engine(model, engine_options(4));
  std::vector<Engine::Handle> together;
  for (const Request& request : requests) together.push_back(engine->submit(traced(request)));
  zip(*engine, together);
  for (size_t i = 0; i < requests.size(); ++i) {
    const Request own = traced(requests[i]);
    const auto one = make_engine(model, engine_options(1));
    const Outcome expected = finished(*one, one->submit(own));
    CHECK(outcome(*together[i]) == expected);
    CHECK(expected == alone(model, requests[i]));
    const auto& trace = *together[i]->request().trace;
    CHECK(trace.n_logprobs() == expected.tokens.size() - 1);
    const auto a = trace.logprobs(0, 1000), b = own.trace->logprobs(0, 1000);
    REQUIRE(a.size() == b.size());
    for (size_t j = 0; j < a.size(); ++j) {
      CHECK(a[j].token == b[j].token);
      CHECK(a[j].logprob == b[j].logprob);
      CHECK(a[j].top == b[j].top);
    }
  }
}

TEST_CASE("a generation waits for its mask while others go on") {
  const auto model = rotary_model();
  for (const int32_t n_prompt : {1, 3, 18}) {
    const auto engine = make_engine(model, engine_options(2));
    bool known = false;
    std::vector<size_t> asked, masked;  // numbers of tokens
    Request waiting = letters(n_prompt, 5);
    waiting.constraint_ready = [&](std::span<const int32_t> tokens) {
      asked.push_back(tokens.size());
      return known;
    };
    waiting.constraint = [&](auto tokens, std::span<uint32_t> allowed) {
      CHECK(known);
      masked.push_back(tokens.size());
      only_a()(tokens, allowed);
    };
    const auto slow = engine->submit(waiting);
    start_and_abandon(*engine, slow);
    const auto other = engine->submit(letters(2, 20));
    CHECK(finished(*engine, other) == alone(model, letters(2, 20)));
    CHECK(slow->progress().n_generated == 0);
    CHECK(engine->session().tokens_seen(0) == n_prompt);
    CHECK(std::ranges::count(asked, n_prompt) == std::ssize(asked));
    CHECK(asked.size() > 10);
    CHECK(masked.empty());
    known = true;
    CHECK(finished(*engine, slow) == alone(model, letters(n_prompt, 5)));
    CHECK(masked.size() == 5);
    // For each token: before it is processed, and before the next one is sampled.
    for (size_t n = n_prompt + 1; n < n_prompt + 5u; ++n) CHECK(std::ranges::count(asked, n) == 2);
  }
}

TEST_CASE("a generation that waits for its mask can be cancelled, parked and fail") {
  const auto model = rotary_model();
  const auto engine = make_engine(model, engine_options(1));
  Request waiting = letters(3, 5);
  int n = 0;
  waiting.constraint_ready = [&](auto) { return ++n > 40; };
  const auto slow = engine->submit(waiting);
  for (int i = 0; i < 4; ++i) start_and_abandon(*engine, slow);
  CHECK(slow->progress().n_generated == 0);
  // One sequence: the other one takes it, and gives it back.
  CHECK(finished(*engine, engine->submit(letters(2, 4))) == alone(model, letters(2, 4)));
  CHECK(finished(*engine, slow) == alone(model, letters(3, 5)));

  waiting.constraint_ready = [](auto) { return false; };
  const auto cancelled = engine->submit(waiting);
  start_and_abandon(*engine, cancelled);
  engine->cancel(cancelled);
  CHECK(cancelled->progress().finish == Finish::cancelled);

  waiting.constraint_ready = [](auto) -> bool { throw std::runtime_error("it failed"); };
  const auto failing = engine->submit(waiting);
  CHECK_THROWS_WITH(finished(*engine, failing), "it failed");
  CHECK(engine->stats().n_active == 0);
}

TEST_CASE("an error only affects its own request") {
  const auto model = rotary_model();
  const auto engine = make_engine(model, engine_options(4));
  Random random(7);
  const auto failing = [&](int which) {
    Request request = random_request(random);
    request.policies.clear();
    if (which == 0) {
      request.constraint = [n = 0](auto, std::span<uint32_t> allowed) mutable {
        if (++n == 2) throw std::runtime_error("which == 0");
        allowed[0] = 8;
      };
    } else if (which == 1) {
      request.policies = {{.sinks = 100}};  // needs more slots than there are
    } else if (which == 2) {
      request.constraint = [](auto, auto) {};  // allows nothing
    } else if (which == 3) {
      request.prompt_logits = [](int32_t i, auto) {
        if (i == 0) throw std::runtime_error("which == 3");
      };
    } else {
      request.sampler = std::make_shared<Sampler>(SamplerOptions(), 3);  // of another vocabulary
    }
    request.max_tokens = 20;
    return request;
  };
  for (int which = 0; which < 5; ++which) {
    const Request before = random_request(random), after = random_request(random);
    const auto a = engine->submit(before), bad = engine->submit(failing(which)),
               b = engine->submit(after);
    const bool a_goes_on = engine->next(a, no_interrupt).has_value();
    CHECK_THROWS(finished(*engine, bad));
    CHECK(bad->progress().finish == Finish::cancelled);
    CHECK(!engine->next(bad, no_interrupt));  // thrown only once
    if (which == 1) {
      CHECK_THROWS_WITH(engine->save(bad, "", no_interrupt),
                        "nothing has been read yet: ask for a piece of the text first");
    } else {  // its processed tokens are still in the cache
      CHECK(open_snapshot(engine->save(bad, "", no_interrupt)).text.tokens == bad->tokens());
    }
    if (a_goes_on) finished(*engine, a);
    CHECK(outcome(*a) == alone(model, before));
    CHECK(finished(*engine, b) == alone(model, after));
    CHECK(engine->stats().n_active == 0);
  }
}

TEST_CASE("a generation continues in the cache of the one that it follows") {
  const auto model = rotary_model();
  const auto engine = make_engine(model, engine_options(2));
  Random random(8);
  for (int round = 0; round < 20; ++round) {
    Request request = random_request(random);
    request.policies.clear();
    request.max_tokens = random.integer(0, 8);
    const auto first = engine->submit(request);
    const Outcome left = finished(*engine, first);

    Request next = random_request(random);
    next.policies.clear();
    Request loads = next;
    const std::vector<std::byte> snapshot = engine->save(first, "", no_interrupt);
    loads.after = {.bytes = snapshot};
    loads.stop = next.stop = {};
    next.prompt.insert(next.prompt.begin(), left.tokens.begin(), left.tokens.end());
    next.follows = first;
    const Request reads = next;
    const auto second = engine->submit(std::move(next));
    const Outcome followed = finished(*engine, second);
    const auto n_read =
        static_cast<int32_t>(left.tokens.size()) - (request.max_tokens != 0 ? 1 : 0);
    // If the text ended with an end token, all of its tokens were processed.
    const int32_t n_new = static_cast<int32_t>(reads.prompt.size()) - second->progress().n_prompt;
    CHECK((n_new == n_read || n_new == n_read + 1));
    CHECK(second->request().follows ==
          nullptr);  // otherwise a conversation would keep all turns alive

    const auto loaded = make_engine(model, engine_options(1));
    CHECK(followed == finished(*loaded, loaded->submit(loads)));
    // The followed generation's state is gone.
    CHECK_THROWS(engine->save(first, "", no_interrupt));
  }
}

TEST_CASE("a generation that cannot follow processes its whole prompt") {
  const auto model = rotary_model();
  Random random(9);
  for (int which = 0; which < 4; ++which) {
    const auto engine = make_engine(model, engine_options(1));
    Request request = random_request(random);
    request.policies.clear();
    request.max_tokens = which == 3 ? 0 : 3;
    request.ignore_end = true;
    request.stop.clear();
    const auto first = engine->submit(request);
    const Outcome left = finished(*engine, first);
    Request next = random_request(random);
    next.policies.clear();
    next.prompt = left.tokens;
    if (which == 0) next.prompt[0] ^= 1;                                        // other tokens
    if (which == 1) next.policies = {{.sinks = 1, .heavy = 0, .recent = 3}};    // another policy
    if (which == 2) finished(*engine, engine->submit(random_request(random)));  // it was used
    next.follows = first;  // otherwise nothing is left to process
    const auto second = engine->submit(next);
    CHECK(finished(*engine, second) == alone(model, next));
    CHECK(second->progress().n_prompt == std::ssize(next.prompt));
  }
}

TEST_CASE("when out of memory, each generation fails or gets the same output as alone") {
  const auto model = rotary_model();
  Random random(10);
  Request requests[3];
  for (Request& request : requests) {
    request = random_request(random);
    request.max_tokens = 12;
    request.ignore_end = true;
    request.stop = {"nowhere"};
    request.policies.clear();
  }
  Outcome expected[3];
  for (int i = 0; i < 3; ++i) expected[i] = alone(model, requests[i]);
  int n_failed = 0, n_hurt = 0, n_exact = 0;
  bool reached = true;
  for (int64_t n = 1; reached; ++n) {
    const auto engine = make_engine(model, engine_options(1, 2));
    Engine::Handle handles[3];
    for (int i = 0; i < 3; ++i) handles[i] = engine->submit(requests[i]);
    engine->next(handles[0], no_interrupt);
    {
      const FailingAllocation failing(n);
      try {
        engine->next(handles[1], no_interrupt);  // the cache grows
        engine->next(handles[2], no_interrupt);  // one is parked
        engine->next(handles[0], no_interrupt);  // and is resumed
      } catch (const std::bad_alloc&) {
      }
      reached = failing.failed();
    }
    n_failed += reached;
    for (int i = 0; i < 3; ++i) {
      try {
        const Outcome end = finished(*engine, handles[i]);
        if (end.finish != Finish::cancelled) {  // otherwise its error has been thrown above
          CHECK(end == expected[i]);
          ++n_exact;
        }
      } catch (const std::bad_alloc&) {
      }
      n_hurt += outcome(*handles[i]).finish == Finish::cancelled;
    }
    CHECK(engine->stats().n_active == 0);
    CHECK(engine->stats().n_waiting == 0);
    CHECK(finished(*engine, engine->submit(requests[0])) == expected[0]);
  }
  CHECK(n_failed > 20);
  CHECK(n_hurt > 5);
  CHECK(n_exact > n_hurt);
}

TEST_CASE(
    "a request that follows a scored prompt whose pass failed gets the same output as alone") {
  const auto request_of = [](std::vector<int32_t> prompt) {
    Request request;
    request.prompt = std::move(prompt);
    request.max_tokens = 4;
    request.ignore_end = true;
    request.sampling.temperature = 0;
    return request;
  };
  constexpr const char* path = H2O_SOURCE_DIR "/tests/data/golden/qwen3moe.gguf";
  SessionOptions options;
  options.n_ctx = 16;
  options.n_batch = 4;
  Request longer = request_of({3, 10, 5, 9});
  const auto one = make_engine(load(path, 1), options);
  const Outcome expected = finished(*one, one->submit(longer));
  int n_failed = 0;
  bool reached = true;
  for (int64_t n = 1; reached; ++n) {
    const auto engine = make_engine(load(path, 1), options);  // allocates in its first pass
    Request scored = request_of({3, 10});
    scored.max_tokens = 0;
    scored.pooling = Pooling::mean;
    longer.follows = engine->submit(std::move(scored));
    {
      const FailingAllocation failing(n);
      try {
        finished(*engine, longer.follows);
      } catch (const std::bad_alloc&) {
      }
      reached = failing.failed();
    }
    n_failed += reached;
    CHECK(finished(*engine, engine->submit(longer)) == expected);
  }
  CHECK(n_failed > 5);
}

TEST_CASE("prompts and samplers are validated against the vocabulary and the context") {
  const auto model = rotary_model();
  const auto engine = make_engine(model, engine_options(1));
  Request request = letters(3);
  request.prompt[1] = 61;
  CHECK_THROWS_AS(engine->submit(request), InvalidArgument);
  request = letters(0);
  CHECK_THROWS_AS(engine->submit(request), InvalidArgument);
  request = letters(1, -2);
  CHECK_THROWS_AS(engine->submit(request), InvalidArgument);
  SessionOptions options = engine_options(2);
  options.n_batch = -1;
  CHECK_THROWS_AS(make_engine(model, options), InvalidArgument);
  options = engine_options(1);
  options.policies.clear();
  const auto bounded = make_engine(model, options);
  CHECK_THROWS_AS(bounded->submit(letters(41)), ContextFull);
  const auto full = bounded->submit(letters(40));
  CHECK(finished(*bounded, full).finish == Finish::length);
  CHECK(full->progress().n_generated == 1);
  CHECK(full->progress().finish_message.starts_with("the context is full"));
}

}  // namespace
}  // namespace h2o
