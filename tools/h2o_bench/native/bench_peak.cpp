// Operations per second of the instructions that products with weights consist of, on registers:
// the most that a kernel can reach, with one thread and with all. A multiply-add is two.
//
// ninja h2o_bench_peak && tests/cpp/h2o_bench_peak
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "cpu/thread_pool.h"

namespace h2o {
namespace {

constexpr int64_t kCalls = 5'000'000;
constexpr int kSums = 12;  // that do not wait for each other
constexpr int kRounds = 5;

// The best of some rounds: other programs only slow it down.
template <class Instructions>
double operations_per_second(int n_threads, int operations, const Instructions& instructions) {
  const auto work = [&] {
    for (int64_t i = 0; i < kCalls; ++i) instructions();
  };
  double least = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const auto begun = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int i = 1; i < n_threads; ++i) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begun;
    least = std::min(least, time.count());
  }
  return static_cast<double>(kCalls) * kSums * operations * n_threads / least;
}

template <class Instructions>
void print(const char* name, bool supported, int operations, const Instructions& instructions) {
  if (!supported) return;
  for (const int n_threads : {1, physical_cores()}) {
    const double rate = operations_per_second(n_threads, operations, instructions);
    std::printf("%-28s %d threads %6.0f * 10^9 operations/s\n", name, n_threads, rate / 1e9);
  }
}

#ifdef __x86_64__

// The factors are 0: denormal numbers would be slow.
#define H2O_TWELVE(instruction)                                                                    \
  asm volatile("vxorps %%xmm14, %%xmm14, %%xmm14\n vxorps %%xmm15, %%xmm15, %%xmm15\n" instruction \
               "0\n" instruction "1\n" instruction "2\n" instruction "3\n" instruction             \
               "4\n" instruction "5\n" instruction "6\n" instruction "7\n" instruction             \
               "8\n" instruction "9\n" instruction "10\n" instruction "11\n" ::                    \
                   : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",       \
                     "xmm9", "xmm10", "xmm11", "xmm14", "xmm15")

void print_all() {
  __builtin_cpu_init();
  print("float32 vfmadd231ps ymm", __builtin_cpu_supports("fma"), 16,
        [] { H2O_TWELVE("vfmadd231ps %%ymm14, %%ymm15, %%ymm"); });
  print("float32 vfmadd231ps zmm", __builtin_cpu_supports("avx512f"), 32,
        [] { H2O_TWELVE("vfmadd231ps %%zmm14, %%zmm15, %%zmm"); });
  print("bf16 vdpbf16ps zmm", __builtin_cpu_supports("avx512bf16"), 64,
        [] { H2O_TWELVE("vdpbf16ps %%zmm14, %%zmm15, %%zmm"); });
  print("int8 vpdpbusd zmm", __builtin_cpu_supports("avx512vnni"), 128,
        [] { H2O_TWELVE("vpdpbusd %%zmm14, %%zmm15, %%zmm"); });
}

#else

void print_all() {}

#endif

}  // namespace
}  // namespace h2o

int main() { h2o::print_all(); }
