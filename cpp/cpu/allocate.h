#pragma once

#include "core/buffer.h"

namespace h2o {

// Zeroed memory aligned to a cache line; pages are committed on first touch. Throws OutOfMemory.
Buffer allocate_zeros(size_t bytes);

}  // namespace h2o
