// The CPU back end: Backend on a table of CpuKernels and a thread pool.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace h2o {

// Whether quantized weights are interleaved (cpu/matmul/interleave.h).
enum class Repack { never, if_it_fits, always };

// n_threads = 0: one per core. isa empty: the fastest that this CPU supports. exact: multiply all
// weights in float, without rounding activations. Throws InvalidArgument for an unsupported
// instruction set.
std::unique_ptr<Backend> make_cpu_backend(int n_threads, const std::string& isa,
                                          Repack repack = Repack::if_it_fits, bool exact = false);

}  // namespace h2o
