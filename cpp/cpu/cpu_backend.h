// The CPU back end: Backend over one table of CpuKernels and a pool of threads.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace h2o {

// n_threads = 0: one for each core. isa empty: the fastest this CPU runs. repacks: whether
// quantised weights are copied in the order of cpu/matmul/interleave.h, where there is memory for
// that. exact: weights in F16 and BF16 are multiplied as they are, in float.
// Throws InvalidArgument for an instruction set this CPU does not run.
std::unique_ptr<Backend> make_cpu_backend(int n_threads, const std::string& isa,
                                          bool repacks = true, bool exact = false);

}  // namespace h2o
