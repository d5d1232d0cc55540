// Buffers of the device, and of the host's memory that the device can copy from while others work.
#pragma once

#include <cstddef>

#include "core/buffer.h"

namespace h2o::cuda {

// Not zeroed. Throw OutOfMemory.
Buffer device_memory(size_t bytes);
Buffer pinned_memory(size_t bytes);

}  // namespace h2o::cuda
