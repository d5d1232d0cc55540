// Detects writes to memory, with the processor's page protection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace h2o::cuda::emulation {

using Memory = std::span<uint32_t>;

constexpr size_t kPageBytes = 4096;

// Until end_watch(), writes to this memory are noticed, and performed. Each part begins a page and
// has its pages to itself. Throws std::system_error.
void begin_watch(const std::vector<Memory>& memory);

// Whether there has been a write.
bool end_watch();

}  // namespace h2o::cuda::emulation
