#pragma once

#include "core/buffer.h"

namespace h2o {

// Zeros, aligned to a cache line, whose pages are taken when they are first touched. Throws
// OutOfMemory.
Buffer allocate_zeros(size_t bytes);

}  // namespace h2o
