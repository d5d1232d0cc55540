// Capabilities of this machine.
#pragma once

#include <cstddef>

namespace h2o {

// Memory read bandwidth of n_threads threads together, in bytes per second: the fastest of n_passes
// over an array of `bytes` bytes, which should be several times the size of the caches. Throws
// InvalidArgument unless all are positive, OutOfMemory.
double read_bandwidth(size_t bytes, int n_threads, int n_passes);

// Bytes that can be allocated without swapping, according to the system and, in a container, its
// limit.
size_t available_memory();

}  // namespace h2o
