// ThreadPool: visits every index exactly once, under any load and timing. Results are plain
// variables, so that ThreadSanitizer detects a missing happens-before.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "cpu/thread_pool.h"

namespace h2o {
namespace {

TEST_CASE("every index is visited once, by a thread of the pool") {
  for (int n_threads = 1; n_threads <= 4; ++n_threads) {
    ThreadPool pool(n_threads);
    CHECK(pool.size() == n_threads);
    for (const int64_t n : {0, 1, 2, 3, 4, 5, 7, 16, 1000, 1003}) {
      CAPTURE(n_threads);
      CAPTURE(n);
      std::vector<int> visits(n);
      std::vector<int> parts(n_threads);  // not atomic: a thread's parts are sequential
      pool.parallel_for(n, [&](int thread, int64_t begin, int64_t end) {
        ++parts.at(thread);
        for (int64_t i = begin; i < end; ++i) ++visits.at(i);
      });
      CHECK(std::count(visits.begin(), visits.end(), 1) == n);
    }
  }
}

TEST_CASE("the caller does the work of a delayed thread") {
  ThreadPool pool(2);
  std::vector<int> visits(1000);
  std::atomic<int> by_caller{0};
  pool.parallel_for(1000, [&](int thread, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++visits.at(i);
    const auto n = static_cast<int>(end - begin);
    if (thread == 0) by_caller += n;
    // The caller must take all parts but this one.
    while (thread == 1 && by_caller < 1000 - n) std::this_thread::yield();
  });
  CHECK(by_caller >= 1000 - part_of(1000, least_part(1000, 2), 2));  // no part is larger
  CHECK(std::count(visits.begin(), visits.end(), 1) == 1000);
}

TEST_CASE("a range of large numbers") {
  ThreadPool pool(3);
  constexpr int64_t kMax = int64_t{1} << 40;
  std::vector<int64_t> lengths(3);
  pool.parallel_for(
      kMax, [&](int thread, int64_t begin, int64_t end) { lengths.at(thread) += end - begin; });
  CHECK(lengths[0] + lengths[1] + lengths[2] == kMax);
}

TEST_CASE("each of many jobs sees what those before it wrote") {
  for (int n_threads = 1; n_threads <= 4; ++n_threads) {
    CAPTURE(n_threads);
    ThreadPool pool(n_threads);
    constexpr int kJobs = 4000;
    constexpr int64_t kN = 12;
    // Every job reads what other threads wrote in the previous job.
    std::vector<int64_t> from(kN);
    std::vector<int64_t> to(kN);
    for (int job = 0; job < kJobs; ++job) {
      pool.parallel_for(kN, [&](int, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) to[i] = from[(i + 5) % kN] + 1;
      });
      std::swap(from, to);
    }
    CHECK(std::count(from.begin(), from.end(), kJobs) == kN);
  }
}

TEST_CASE("fewer indices than threads, many times") {
  ThreadPool pool(4);
  int64_t counts[3] = {};
  for (int job = 0; job < 3000; ++job) {
    pool.parallel_for(1 + job % 3, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++counts[i];
    });
  }
  CHECK(counts[0] == 3000);
  CHECK(counts[1] == 2000);
  CHECK(counts[2] == 1000);
}

TEST_CASE("for_each visits each index once; in_order finishes in order") {
  for (int n_threads = 1; n_threads <= 4; ++n_threads) {
    CAPTURE(n_threads);
    ThreadPool pool(n_threads);
    for (const int64_t n : {0, 1, 2, 7, 500}) {
      std::vector<int> visits(n);
      pool.for_each(n, [&](int, int64_t i) { ++visits.at(i); });
      std::vector<int64_t> own(n_threads);  // computed by the thread, to be passed to finish
      std::vector<int64_t> order;
      pool.in_order(
          n,
          [&](int thread, int64_t i) {
            ++visits.at(i);
            own.at(thread) = i;
          },
          [&](int thread, int64_t i) {
            CHECK(own.at(thread) == i);
            order.push_back(i);
          });
      CHECK(std::count(visits.begin(), visits.end(), 2) == n);
      CHECK(std::ssize(order) == n);
      CHECK(std::is_sorted(order.begin(), order.end()));
    }
  }
}

TEST_CASE("a sleeping pool wakes up, and waits for a slow part") {
  for (int n_threads = 2; n_threads <= 4; ++n_threads) {
    ThreadPool pool(n_threads);
    for (int round = 0; round < 10; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      std::vector<int> visits(n_threads);
      pool.parallel_for(n_threads, [&](int thread, int64_t begin, int64_t) {
        if (thread == round % n_threads) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        ++visits.at(begin);
      });
      CHECK(std::count(visits.begin(), visits.end(), 1) == n_threads);
    }
  }
}

TEST_CASE("pools are created and destroyed, used or not, awake or asleep") {
  for (int round = 0; round < 300; ++round) {
    const int n_threads = 1 + round % 4;
    const auto pool = std::make_unique<ThreadPool>(n_threads);
    if (round % 50 == 49) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (round % 3 == 0) continue;
    std::vector<int> visits(9);
    pool->parallel_for(9, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++visits[i];
    });
    CHECK(std::count(visits.begin(), visits.end(), 1) == 9);
  }
}

}  // namespace
}  // namespace h2o
