// How much of the latency of memory a kernel hides, for assertions at compile time.
#pragma once

#include <algorithm>
#include <cstddef>

namespace h2o::cuda {

// An H200 reads 4.8 TB/s with 132 multiprocessors, and answers after about 675 ns. To keep it busy,
// a multiprocessor must have requested what it reads in that time: 24 KiB. Or it has to be busy
// itself: 128 lanes at 1.755 GHz execute this many operations in that time.
constexpr size_t kBytesInLatency = 24 << 10;
constexpr size_t kOperationsInLatency = 151'000;

// In percent, for a multiprocessor that requests `bytes` and executes `operations` on them before
// it waits for the next.
constexpr size_t latency_hidden(size_t bytes, size_t operations) {
  return std::max(100 * bytes / kBytesInLatency, 100 * operations / kOperationsInLatency);
}

}  // namespace h2o::cuda
