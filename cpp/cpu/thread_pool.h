// ThreadPool: splits a range over a fixed set of threads. Does not use OpenMP, to avoid conflicts
// with another library's runtime in the same process.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace h2o {

// Number of physical cores; number of processors if the system does not report cores.
int physical_cores();

// Multiply-adds below which parallel execution costs more than it saves.
constexpr int64_t kParallelWork = 100'000;

// How many of the `left` remaining units of a job a free thread takes, at least `least`: large
// parts first, because taking one costs time, and small ones last, so that threads finish together
// even if some are slower or were delayed.
constexpr int64_t part_of(int64_t left, int64_t least, int n_threads) {
  return std::min(left, std::max(least, left / (2 * n_threads)));
}

// The smallest part of n units.
constexpr int64_t least_part(int64_t n, int n_threads) {
  return std::max<int64_t>(1, n / (16 * n_threads));
}

class ThreadPool {
 public:
  // n_threads >= 1, including the caller's. Throws std::system_error if a thread cannot be started.
  explicit ThreadPool(int n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls body(thread, begin, end) on consecutive parts of [0, n) and waits for all. Any free
  // thread takes the next part, so on a busy machine the caller does the work of threads that are
  // not awake yet. body must not throw. One caller at a time.
  template <class Body>
  void parallel_for(int64_t n, const Body& body) {
    if (size() == 1 || n <= 1) {
      body(0, int64_t{0}, n);
      return;
    }
    run({[](const void* context, int thread, int64_t begin, int64_t end) {
           (*static_cast<const Body*>(context))(thread, begin, end);
         },
         &body, n, std::min(n, kMaxUnits)});
  }

  // The same, on the caller's thread alone if `work`, in multiply-adds, is small.
  template <class Body>
  void parallel_for(int64_t n, int64_t work, const Body& body) {
    if (work < kParallelWork) {
      body(0, int64_t{0}, n);
    } else {
      parallel_for(n, body);
    }
  }

  // Calls body(thread, i) for each i < n, dynamically scheduled, and waits for all.
  template <class Body>
  void for_each(int64_t n, const Body& body) {
    run_in_order({[](const void* context, int thread, int64_t i) {
                    (*static_cast<const Body*>(context))(thread, i);
                  },
                  nullptr, &body, n});
  }

  // The same; the thread then calls finish(thread, i), after finish(i - 1) has returned.
  template <class Body, class Finish>
  void in_order(int64_t n, const Body& body, const Finish& finish) {
    struct Both {
      const Body& body;
      const Finish& finish;
    } const both{body, finish};
    run_in_order({[](const void* context, int thread, int64_t i) {
                    static_cast<const Both*>(context)->body(thread, i);
                  },
                  [](const void* context, int thread, int64_t i) {
                    static_cast<const Both*>(context)->finish(thread, i);
                  },
                  &both, n});
  }

 private:
  ThreadPool() = default;

  struct Job {
    void (*call)(const void* context, int thread, int64_t begin, int64_t end) = nullptr;
    const void* context = nullptr;
    int64_t n = 0;
    int64_t n_units = 0;  // that [0, n) is divided into

    int64_t begin(int64_t unit) const { return n * unit / n_units; }
  };

  struct OrderedJob {
    void (*body)(const void* context, int thread, int64_t i);
    void (*finish)(const void* context, int thread, int64_t i);  // may be nullptr
    const void* context;
    int64_t n;
  };

  static constexpr int64_t kMaxUnits = int64_t{1} << 16;

  void run(const Job& job);
  void run_in_order(const OrderedJob& job);
  void take_parts(int thread);
  void work(int thread);

  int n_threads_ = 1;
  Job job_;                              // read only by threads that have a part of it
  std::atomic<uint64_t> left_{0};        // its smallest part << 32 | units that no thread has taken
  std::atomic<uint32_t> done_{0};        // completed units of the job
  std::atomic<uint32_t> generation_{0};  // of the newest job; idle threads wait for it to change
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> next_{0};      // next i of an ordered job
  std::atomic<int64_t> finished_{0};  // completed i's of it
  std::vector<std::thread> workers_;
};

}  // namespace h2o
