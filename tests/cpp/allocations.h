// Counts what this executable allocates by operator new; the back end's own memory is not counted.
#pragma once

#include <cstdint>

namespace h2o {

// How often any thread has called operator new so far.
int64_t allocations();

}  // namespace h2o
