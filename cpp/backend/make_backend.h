// The one place that names every back end.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace h2o {

// device: "auto" (the CPU, until CUDA has been measured), "cpu", "cuda" or "cuda:N".
// n_threads: of the CPU back end, 0 = one for each processor. The environment variable H2O_ISA
// forces the CPU's instruction set by name; H2O_REPACK=0 leaves weights as the file has them.
// exact: weights in F16 and BF16 are multiplied as they are, in float, which only the CPU can.
// Throws InvalidArgument.
std::unique_ptr<Backend> make_backend(const std::string& device, int n_threads, bool exact = false);

}  // namespace h2o
