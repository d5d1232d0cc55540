// What this machine can do at most.
#pragma once

#include <cstddef>

namespace h2o {

// Bytes per second at which n_threads together read memory: the fastest of n_passes over an array
// of `bytes` bytes, which should be several times the size of the caches. Throws InvalidArgument
// for what is not positive, OutOfMemory.
double read_bandwidth(size_t bytes, int n_threads, int n_passes);

// Bytes that can be allocated without swapping, as the system and, of a container, its limit say.
size_t available_memory();

}  // namespace h2o
