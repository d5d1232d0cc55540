// Selects kernels for this CPU.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace h2o {

// The tables in this build that this CPU and operating system support, from the newest instruction
// set to "scalar".
std::vector<const CpuKernels*> supported_kernels();

// The table named `isa`, or the fastest on this CPU if `isa` is empty; with `exact` the fastest
// without bf16 products. Throws InvalidArgument listing the supported names.
const CpuKernels& choose_kernels(const std::string& isa, bool exact = false);

}  // namespace h2o
