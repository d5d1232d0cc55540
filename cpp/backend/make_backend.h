// Creates a back end by name. The only file that knows all of them.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace h2o {

// device: "auto" (the CPU, until CUDA has been measured), "cpu", "cuda" or "cuda:N".
// n_threads: for the CPU back end; 0 = one per processor. The environment variable H2O_ISA forces
// the CPU's instruction set by name; H2O_REPACK=0 keeps weights in the file's layout.
// exact: multiply F16 and BF16 weights in float, without rounding activations. CPU only.
// Throws InvalidArgument.
std::unique_ptr<Backend> make_backend(const std::string& device, int n_threads, bool exact = false);

}  // namespace h2o
