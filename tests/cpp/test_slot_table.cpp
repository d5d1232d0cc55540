// SlotTable: which generation has which sequence.
#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "session_rig.h"
#include "text/generation.h"
#include "text/slot_table.h"

namespace h2o {
namespace {

std::shared_ptr<Generation> generation() {
  return std::make_shared<Generation>(std::make_shared<EngineMonitor>(), Request{});
}

constexpr KvPolicy kPolicy{.sinks = 1, .heavy = 2, .recent = 3};

SessionOptions options(int32_t n_sequences, int32_t max_sequences = 0) {
  return {.policies = {kPolicy},
          .n_ctx = 16,
          .n_batch = 4,
          .n_sequences = n_sequences,
          .max_sequences = max_sequences};
}

TEST_CASE("an occupied sequence is not taken, a released one keeps its content") {
  Session session(tiny_model(1), options(1));
  SlotTable slots(session);
  const auto first = generation(), second = generation();
  const int32_t sequence = slots.take();
  REQUIRE(sequence == 0);
  CHECK(!slots.is_active(sequence));
  CHECK(!slots.holds(sequence, *first));
  feed(session, sequence, {1, 2, 3});
  slots.occupy(sequence, first);
  CHECK(slots.n_active() == 1);
  CHECK(slots.is_active(sequence));
  CHECK(slots.holds(sequence, *first));
  CHECK(!slots.holds(sequence, *second));
  CHECK(slots.take() == -1);

  slots.release(sequence);
  CHECK(slots.n_active() == 0);
  CHECK(!slots.is_active(sequence));
  CHECK(slots.holds(sequence, *first));
  CHECK(slots.take() == sequence);  // which changes nothing yet
  CHECK(slots.holds(sequence, *first));
  CHECK(session.tokens_seen(sequence) == 3);

  slots.reset(sequence, {});
  CHECK(!slots.holds(sequence, *first));
  CHECK(session.tokens_seen(sequence) == 0);
}

TEST_CASE("no sequence is neither occupied nor held") {
  Session session(tiny_model(1), options(1));
  const SlotTable slots(session);
  CHECK(!slots.is_active(-1));
  CHECK(!slots.holds(-1, *generation()));
}

TEST_CASE("the first to be taken is a sequence that nothing can continue, then the oldest") {
  Session session(tiny_model(1), options(4));
  SlotTable slots(session);
  std::vector<std::shared_ptr<Generation>> all;
  for (int32_t i = 0; i < 4; ++i) {
    all.push_back(generation());
    CHECK(slots.take() == i);
    slots.occupy(i, all.back());
  }
  for (const int32_t i : {2, 0, 3, 1}) slots.release(i);
  CHECK(slots.take() == 2);
  all[3] = nullptr;
  CHECK(slots.take() == 3);
  slots.vacate(1);
  CHECK(!slots.holds(1, *all[1]));
  CHECK(slots.take() == 1);
}

TEST_CASE("sequences double up to the maximum, and keep their content") {
  Session session(tiny_model(1), options(1, 3));
  SlotTable slots(session);
  CHECK(slots.max_sequences() == 3);
  const auto owner = generation();
  std::vector<int32_t> sizes;
  for (int32_t i = 0; i < 3; ++i) {
    REQUIRE(slots.take() == i);
    feed(session, i, {1, 2});
    slots.occupy(i, owner);
    sizes.push_back(session.options().n_sequences);
  }
  CHECK(sizes == std::vector<int32_t>{1, 2, 3});
  CHECK(slots.take() == -1);
  for (int32_t i = 0; i < 3; ++i) {
    CHECK(slots.holds(i, *owner));
    CHECK(session.tokens_seen(i) == 2);
  }
}

// The policy's room is always used up.
TEST_CASE("a sequence has its own policies until it is reset to those of the session") {
  Session session(tiny_model(1), options(1));
  SlotTable slots(session);
  const std::vector<int32_t> tokens(12, 5);
  const auto kept = [&] {
    for (const int32_t token : tokens) feed(session, 0, {token});
    return session.tokens_kept(0);
  };
  const int32_t n_kept = kept();
  CHECK(n_kept < 12);
  CHECK(!slots.has_own_policies(0));

  const KvPolicy smaller{.sinks = 1, .heavy = 0, .recent = 3};
  slots.reset(0, {&smaller, 1});
  CHECK(slots.has_own_policies(0));
  CHECK(kept() == n_kept - 2);

  const KvPolicy too_large{.sinks = 100};  // needs more slots than there are
  CHECK_THROWS(slots.reset(0, {&too_large, 1}));
  CHECK(slots.has_own_policies(0));

  slots.reset(0, {});
  CHECK(!slots.has_own_policies(0));
  CHECK(kept() == n_kept);
}

}  // namespace
}  // namespace h2o
