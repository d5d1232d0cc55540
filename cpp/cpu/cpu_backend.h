// The CPU back end: Backend on a table of CpuKernels and a thread pool.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace h2o {

// n_threads = 0: one per core. isa empty: the fastest that this CPU supports. repacks: interleave
// quantized weights (cpu/matmul/interleave.h) if there is enough memory. exact: multiply F16 and
// BF16 weights in float, without rounding activations. Throws InvalidArgument for an unsupported
// instruction set.
std::unique_ptr<Backend> make_cpu_backend(int n_threads, const std::string& isa,
                                          bool repacks = true, bool exact = false);

}  // namespace h2o
