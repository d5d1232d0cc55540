#pragma once

#include "core/buffer.h"

namespace h2o {

// Zeroed memory aligned to a cache line; pages are committed on first touch. Throws OutOfMemory.
Buffer allocate_zeros(size_t bytes);

// Allocates memory that will be used as a whole: on Linux it is committed in huge pages, if the
// system has them, because translating addresses of small ones slows reading.
Buffer allocate_huge(size_t bytes);

}  // namespace h2o
