// ThreadPool: splits a range over a fixed set of threads. No OpenMP, so that nothing collides with
// another library's runtime in the same process.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace h2o {

// How many cores this machine has: of hardware threads that share one, the first counts. As many
// as there are processors where the system does not say.
int physical_cores();

class ThreadPool {
 public:
  // n_threads >= 1, counting the caller's. Throws std::system_error if one cannot be started.
  explicit ThreadPool(int n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(thread, begin, end) on consecutive parts of [0, n) and waits for all. Whoever is
  // free takes the next part: on a busy machine the caller does the work of threads that have not
  // been woken yet. body must not throw. One caller at a time.
  template <class Body>
  void parallel_for(int64_t n, const Body& body) {
    if (workers_.empty() || n <= 1) {
      body(0, int64_t{0}, n);
      return;
    }
    run({[](const void* context, int thread, int64_t begin, int64_t end) {
           (*static_cast<const Body*>(context))(thread, begin, end);
         },
         &body, n});
  }

 private:
  ThreadPool() = default;

  struct Job {
    void (*call)(const void* context, int thread, int64_t begin, int64_t end) = nullptr;
    const void* context = nullptr;
    int64_t n = 0;
  };

  void run(const Job& job);
  void take_parts(int thread);
  void work(int thread);

  Job job_;                              // read only by who has a part of it
  uint32_t n_parts_ = 0;                 // of every job
  std::atomic<uint64_t> ticket_{0};      // generation of the job << 32 | its next part
  std::atomic<uint32_t> done_{0};        // parts of the job that are finished
  std::atomic<uint32_t> generation_{0};  // of the newest job: what idle threads wait for
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace h2o
