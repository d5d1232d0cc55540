// Which kernels this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace h2o {

// Every table that this build has and this CPU and operating system can run, fastest first.
// The last one is "scalar".
std::vector<const CpuKernels*> supported_kernels();

// The table called `isa`, or the fastest when `isa` is empty; with `exact` the next that has no
// products in bf16. Throws InvalidArgument listing the supported names.
const CpuKernels& choose_kernels(const std::string& isa, bool exact = false);

}  // namespace h2o
