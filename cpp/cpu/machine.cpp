#include "cpu/machine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/error.h"
#include "cpu/allocate.h"
#include "cpu/thread_pool.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <unistd.h>
#endif

namespace h2o {
namespace {

// One cache line: enough independent sums that loads are the bottleneck, not additions.
using Line = std::array<uint64_t, 8>;

// With `prefetches`, as decode reads weights: 8 KiB ahead, into the second-level cache.
template <bool prefetches>
uint64_t sum(const Line* lines, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 8192 / sizeof(Line);
  Line sums{};
  for (int64_t i = begin; i < end; ++i) {
    if (prefetches) __builtin_prefetch(lines + i + kAhead, 0, 2);
    for (size_t j = 0; j < sums.size(); ++j) sums[j] += lines[i][j];
  }
  uint64_t total = 0;
  for (const uint64_t part : sums) total += part;
  return total;
}

#ifdef __linux__

// The number after `name` in a file of lines "name number"; with an empty name the first number.
// `none` if missing.
size_t number_in(const char* path, std::string_view name, size_t none) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (!line.starts_with(name)) continue;
    const size_t digit = line.find_first_of("0123456789", name.size());
    if (digit == line.npos) return none;  // "max"
    return std::strtoull(line.c_str() + digit, nullptr, 10);
  }
  return none;
}

#endif

}  // namespace

size_t available_memory() {
#ifdef __linux__
  const size_t kib = number_in("/proc/meminfo", "MemAvailable:", SIZE_MAX / 1024);
  const size_t limit = number_in("/sys/fs/cgroup/memory.max", "", SIZE_MAX);
  const size_t used = number_in("/sys/fs/cgroup/memory.current", "", 0);
  const size_t cached = number_in("/sys/fs/cgroup/memory.stat", "file ", 0);
  const size_t in_use = used - std::min(used, cached);
  return std::min(kib * 1024, limit - std::min(limit, in_use));
#elif defined(_WIN32)
  MEMORYSTATUSEX status = {};
  status.dwLength = sizeof(status);
  GlobalMemoryStatusEx(&status);
  return static_cast<size_t>(status.ullAvailPhys);
#else
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE) / 2;
#endif
}

double read_bandwidth(size_t bytes, int n_threads, int n_passes) {
  const auto n_lines = static_cast<int64_t>(bytes / sizeof(Line));
  require(n_lines > 0 && n_threads > 0 && n_passes > 0, "[read_bandwidth] ", bytes, " bytes, ",
          n_threads, " threads, ", n_passes, " passes, expected 64 bytes, 1 and 1 or more");
  const Buffer buffer = allocate_huge(n_lines * sizeof(Line));  // as weights
  Line* const lines = buffer.as<Line>();
  ThreadPool pool(n_threads);
  // First touch by the reading thread places pages on its NUMA node.
  pool.parallel_for(n_lines, [&](int, int64_t begin, int64_t end) {
    std::fill(lines + begin, lines + end, Line{1});
  });

  double fastest = 0;
  for (int pass = 0; pass < n_passes; ++pass) {
    std::atomic<uint64_t> total{0};
    const auto begun = std::chrono::steady_clock::now();
    pool.parallel_for(n_lines, [&](int, int64_t begin, int64_t end) {
      // which is faster depends on the CPU
      const auto add = pass % 2 == 0 ? sum<true> : sum<false>;
      total.fetch_add(add(lines, begin, end), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
    // The check also prevents the compiler from removing the reads.
    if (total.load() != static_cast<uint64_t>(n_lines))
      throw std::logic_error("[read_bandwidth] wrong sum");
    fastest = std::max(fastest, static_cast<double>(n_lines * sizeof(Line)) / seconds.count());
  }
  return fastest;
}

}  // namespace h2o
