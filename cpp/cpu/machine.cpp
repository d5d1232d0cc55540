#include "cpu/machine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>

#include "core/error.h"
#include "cpu/thread_pool.h"

namespace h2o {
namespace {

// One cache line: enough independent sums that loads, not additions, are what takes time.
using Line = std::array<uint64_t, 8>;

uint64_t sum(const Line* lines, int64_t begin, int64_t end) {
  Line sums{};
  for (int64_t i = begin; i < end; ++i) {
    for (size_t j = 0; j < sums.size(); ++j) sums[j] += lines[i][j];
  }
  uint64_t total = 0;
  for (const uint64_t part : sums) total += part;
  return total;
}

}  // namespace

double read_bandwidth(size_t bytes, int n_threads, int n_passes) {
  const auto n_lines = static_cast<int64_t>(bytes / sizeof(Line));
  require(n_lines > 0 && n_threads > 0 && n_passes > 0, "[read_bandwidth] ", bytes, " bytes, ",
          n_threads, " threads, ", n_passes, " passes, expected 64 bytes, 1 and 1 or more");
  const std::unique_ptr<Line[]> lines(new (std::nothrow) Line[n_lines]);
  if (lines == nullptr) {
    throw OutOfMemory(text("[read_bandwidth] cannot allocate ", bytes, " bytes"));
  }
  ThreadPool pool(n_threads);
  // Whoever reads a page should be who touched it first, so that it is in memory near by.
  pool.parallel_for(n_lines, [&](int, int64_t begin, int64_t end) {
    std::fill(lines.get() + begin, lines.get() + end, Line{1});
  });

  double fastest = 0;
  for (int pass = 0; pass < n_passes; ++pass) {
    std::atomic<uint64_t> total{0};
    const auto begun = std::chrono::steady_clock::now();
    pool.parallel_for(n_lines, [&](int, int64_t begin, int64_t end) {
      total.fetch_add(sum(lines.get(), begin, end), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
    // The check is also what keeps the reads from being optimised away.
    if (total.load() != static_cast<uint64_t>(n_lines))
      throw std::logic_error("[read_bandwidth] wrong sum");
    fastest = std::max(fastest, static_cast<double>(n_lines * sizeof(Line)) / seconds.count());
  }
  return fastest;
}

}  // namespace h2o
