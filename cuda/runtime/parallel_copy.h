// Copies host memory with several threads: one is slower than the bus to the device.
#pragma once

#include <cstddef>

namespace h2o::cuda {

// Copies as std::memcpy does, with fewer threads if the system does not start more.
void parallel_copy(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace h2o::cuda
