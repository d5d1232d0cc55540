#include "cpu/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <locale>
#include <string>

namespace h2o {
namespace {

// A forward pass submits a job every few microseconds. A thread that sleeps in between would spend
// longer waking up than working, and a hypervisor may deschedule its processor and take
// milliseconds to restore it. So threads spin for the typical time between two passes, then sleep.
constexpr std::chrono::microseconds kSpinning(1000);
constexpr int kSpinsPerLook = 512;  // between readings of the clock

void relax() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waits until `value` differs from `old`.
template <class T>
void wait_while(const std::atomic<T>& value, T old) {
  if (value.load(std::memory_order_acquire) != old) return;
  const auto end = std::chrono::steady_clock::now() + kSpinning;
  do {
    for (int i = 0; i < kSpinsPerLook; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
    std::this_thread::yield();  // lets other threads run
  } while (std::chrono::steady_clock::now() < end);
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

int physical_cores() {
  const int n = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  int n_cores = 0;
  for (int cpu = 0; cpu < n; ++cpu) {
    const std::string directory = "/sys/devices/system/cpu/cpu" + std::to_string(cpu);
    std::ifstream siblings(directory + "/topology/thread_siblings_list");
    siblings.imbue(std::locale::classic());  // not the application's
    int first = -1;
    if (siblings >> first && first == cpu) ++n_cores;
  }
  return n_cores > 0 ? n_cores : n;
}

// Delegating: if a thread cannot be started, the destructor stops the others.
ThreadPool::ThreadPool(int n_threads) : ThreadPool() {
  n_threads_ = n_threads;
  workers_.reserve(n_threads - 1);
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

int ThreadPool::size() const { return n_threads_; }

void ThreadPool::run(const Job& job) {
  // No thread reads job_ now: all parts of the last job are done, and only threads with a part read
  // it.
  job_ = job;
  done_.store(0, std::memory_order_relaxed);
  left_.store(least_part(job.n_units, n_threads_) << 32 | job.n_units, std::memory_order_release);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  take_parts(0);
  for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != job.n_units;) {
    wait_while(done_, done);
  }
}

// Each thread takes the next i. All earlier ones are already being processed, so waiting for them
// terminates.
void ThreadPool::run_in_order(const OrderedJob& job) {
  next_.store(0, std::memory_order_relaxed);
  finished_.store(0, std::memory_order_relaxed);
  parallel_for(n_threads_, [&](int thread, int64_t, int64_t) {
    while (true) {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= job.n) return;
      job.body(job.context, thread, i);
      if (job.finish == nullptr) continue;
      for (int spins = 1; finished_.load(std::memory_order_acquire) != i; ++spins) {
        relax();
        if (spins % kSpinsPerLook == 0) std::this_thread::yield();
      }
      job.finish(job.context, thread, i);
      finished_.store(i + 1, std::memory_order_release);
    }
  });
}

// A late thread finds no units left, or takes those of the next job: it succeeds only if what it
// read is what is left now.
void ThreadPool::take_parts(int thread) {
  uint64_t left = left_.load(std::memory_order_acquire);
  while (const auto n_left = static_cast<uint32_t>(left)) {
    const int64_t n = part_of(n_left, static_cast<int64_t>(left >> 32), n_threads_);
    if (!left_.compare_exchange_weak(left, left - n, std::memory_order_acq_rel,
                                     std::memory_order_acquire)) {
      continue;
    }
    const Job job = job_;
    const int64_t first = job.n_units - n_left;
    job.call(job.context, thread, job.begin(first), job.begin(first + n));
    if (done_.fetch_add(n, std::memory_order_acq_rel) + n == job.n_units) done_.notify_one();
    left = left_.load(std::memory_order_acquire);
  }
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    wait_while(generation_, seen);
    seen = generation_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    take_parts(thread);
  }
}

}  // namespace h2o
