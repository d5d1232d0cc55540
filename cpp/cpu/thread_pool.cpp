#include "cpu/thread_pool.h"

namespace h2o {
namespace {

// A forward pass hands out a job every few microseconds: a thread that slept in between would
// spend longer waking than working. It spins for some tens of microseconds, then sleeps.
constexpr int kSpins = 2000;

void relax() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waits until `value` is no longer `old`.
template <class T>
void wait_while(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int n_threads) {
  for (int thread = 1; thread < n_threads; ++thread) {
    workers_.emplace_back([this, thread] { work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(const Job& job) {
  job_ = job;
  running_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  run_part(0);
  for (int left; (left = running_.load(std::memory_order_acquire)) != 0;) {
    wait_while(running_, left);
  }
}

void ThreadPool::run_part(int thread) const {
  const int64_t begin = job_.n * thread / size();
  const int64_t end = job_.n * (thread + 1) / size();
  if (begin < end) job_.call(job_.context, thread, begin, end);
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    wait_while(generation_, seen);
    ++seen;  // the caller waits for every worker, so no generation is ever missed
    if (stopping_.load(std::memory_order_relaxed)) return;
    run_part(thread);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
  }
}

}  // namespace h2o
