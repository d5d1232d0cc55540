// AdmissionQueue: who waits for a sequence, in which order, and who is admitted when.
#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "allocations.h"
#include "text/admission_queue.h"

namespace h2o {
namespace {

using Handle = AdmissionQueue::Handle;

struct Rig {
  Handle add(bool is_eager = true) {
    const auto generation =
        std::make_shared<Generation>(std::make_shared<EngineMonitor>(), Request{.eager = is_eager});
    queue.add(generation);
    return generation;
  }

  // Removes all admitted generations.
  std::vector<Handle> take_all() {
    std::vector<Handle> out;
    while (queue.has_admitted()) {
      out.push_back(queue.front());
      queue.pop_front();
    }
    return out;
  }

  AdmissionQueue queue;
};

TEST_CASE("generations leave in order of arrival, one that was put back first") {
  Rig rig;
  const Handle a = rig.add(), b = rig.add(false), c = rig.add();
  CHECK(rig.queue.front() == a);
  rig.queue.pop_front();
  CHECK(rig.queue.front() == b);
  rig.queue.push_front(a);
  CHECK(rig.take_all() == std::vector<Handle>{a, b, c});
  CHECK(!rig.queue.has_admitted());
}

TEST_CASE("only eager generations are counted and limited") {
  Rig rig;
  rig.queue.set_max_eager(1);
  const Handle a = rig.add(), b = rig.add(), c = rig.add(false);
  CHECK(a->admitted());
  CHECK(!b->admitted());
  CHECK(c->admitted());
  CHECK(rig.queue.n_admitted() == 2);
  CHECK(rig.queue.n_admitted_eager() == 1);
  CHECK(rig.queue.n_unadmitted() == 1);
  CHECK(rig.take_all() == std::vector<Handle>{a, c});
}

TEST_CASE("generations are admitted in order of arrival, when there is room") {
  Rig rig;
  rig.queue.set_max_eager(2);
  const Handle a = rig.add(), b = rig.add(), c = rig.add(), d = rig.add();
  rig.queue.pop_front();
  CHECK(!c->admitted());  // not before admit()
  const Handle e = rig.add();
  CHECK(!e->admitted());  // there is room, but others came before
  rig.queue.admit();
  CHECK(c->admitted());
  CHECK(!d->admitted());
  rig.queue.set_max_eager(4);
  CHECK(d->admitted());
  CHECK(e->admitted());
  CHECK(rig.take_all() == std::vector<Handle>{b, c, d, e});
}

TEST_CASE("a lower limit does not remove what is admitted") {
  Rig rig;
  const Handle a = rig.add(), b = rig.add();
  rig.queue.set_max_eager(0);
  CHECK(rig.queue.n_admitted_eager() == 2);
  const Handle c = rig.add();
  CHECK(!c->admitted());
  CHECK(rig.take_all() == std::vector<Handle>{a, b});
}

TEST_CASE("a removed generation is nowhere, and makes room") {
  Rig rig;
  rig.queue.set_max_eager(1);
  const Handle a = rig.add(), b = rig.add(), c = rig.add();
  CHECK(rig.queue.remove(b));
  CHECK(!rig.queue.remove(b));
  CHECK(rig.queue.n_unadmitted() == 1);
  CHECK(rig.queue.remove(a));
  CHECK(rig.queue.n_admitted_eager() == 0);
  rig.queue.admit();
  CHECK(rig.take_all() == std::vector<Handle>{c});
}

TEST_CASE("those that wait for admission are found first") {
  Rig rig;
  rig.queue.set_max_eager(1);
  const Handle a = rig.add(), b = rig.add();
  const auto any = [](const Handle&) { return true; };
  CHECK(rig.queue.find(any) == b);
  rig.queue.remove(b);
  CHECK(rig.queue.find(any) == a);
  CHECK(rig.queue.find([](const Handle&) { return false; }) == nullptr);
}

TEST_CASE("without memory, generations are admitted later") {
  Rig rig;
  rig.queue.set_max_eager(0);
  std::vector<Handle> all;
  for (int i = 0; i < 500; ++i) all.push_back(rig.add());  // more than fit in one block of a deque
  {
    const FailingAllocation failing(1, false);
    rig.queue.set_max_eager(500);
    CHECK(failing.failed());
  }
  CHECK(rig.queue.n_admitted() + rig.queue.n_unadmitted() == 500);
  CHECK(rig.queue.n_unadmitted() > 0);
  rig.queue.admit();
  CHECK(rig.take_all() == all);
}

}  // namespace
}  // namespace h2o
