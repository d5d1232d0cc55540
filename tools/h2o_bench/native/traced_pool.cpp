// ThreadPool on one thread, in place of cpu/thread_pool.cpp: calls the parts that its threads would
// take, one after the other, and records how long each takes.
#include "traced_pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "cpu/thread_pool.h"

namespace h2o {
namespace {

// Not the thread's processor time: asking for that takes longer than a short part.
double now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

class Stopwatch {
 public:
  Stopwatch() {
    cost_ = 1;
    for (int i = 0; i < 1000; ++i) {
      const double before = now();
      cost_ = std::min(cost_, now() - before);
    }
    start();
  }
  void start() { last_ = now(); }
  // Seconds since start() or the last lap(), without what asking takes.
  double lap() {
    const double time = now();
    return std::max(0.0, time - std::exchange(last_, time) - cost_);
  }

 private:
  double cost_, last_;
};

Stopwatch stopwatch;
Trace current;
int traced_threads = 0;  // 0: as many as the pool has
bool tracing = false;

// Room for the times of a job's parts, so that taking them allocates nothing.
TracedJob begin_job(int64_t n_parts) {
  TracedJob job{stopwatch.lap(), {}, {}};
  job.parts.reserve(n_parts);
  job.finish.reserve(n_parts);
  stopwatch.start();
  return job;
}

void end_job(TracedJob job) {
  if (tracing) current.jobs.push_back(std::move(job));
  stopwatch.start();
}

}  // namespace

void begin_trace(int n_threads) {
  current = {};
  traced_threads = n_threads;
  tracing = true;
  stopwatch.start();
}

Trace end_trace() {
  current.after = stopwatch.lap();
  tracing = false;
  return std::move(current);
}

int physical_cores() { return 1; }

ThreadPool::ThreadPool(int n_threads) : n_threads_(n_threads) {}
ThreadPool::~ThreadPool() = default;
int ThreadPool::size() const { return traced_threads > 0 ? traced_threads : n_threads_; }

void ThreadPool::run(const Job& job) {
  TracedJob traced = begin_job(job.n_units);
  const int64_t least = least_part(job.n_units, size());
  for (int64_t first = 0; first < job.n_units;) {
    const int64_t n = part_of(job.n_units - first, least, size());
    job.call(job.context, 0, job.begin(first), job.begin(first + n));
    traced.parts.push_back(stopwatch.lap());
    first += n;
  }
  end_job(std::move(traced));
}

void ThreadPool::run_in_order(const OrderedJob& job) {
  TracedJob traced = begin_job(job.n);
  for (int64_t i = 0; i < job.n; ++i) {
    job.body(job.context, 0, i);
    traced.parts.push_back(stopwatch.lap());
    if (job.finish == nullptr) continue;
    job.finish(job.context, 0, i);
    traced.finish.push_back(stopwatch.lap());
  }
  end_job(std::move(traced));
}

}  // namespace h2o
