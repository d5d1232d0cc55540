// Chooses a device, and creates a back end by name. The only file that knows all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "backend/backend.h"

namespace h2o {

// The meaning of a model's device "auto".
struct AutoDevice {
  std::string name;    // "cuda" or "cpu"
  std::string reason;  // "": a GPU is not wanted
  bool warns;          // there is a GPU that cannot be used
};

// The GPU, if the environment variable H2O_CUDA_AUTO is 1, there is one, and n_bytes are free on
// it. If the model cannot be opened there, the caller opens it on the CPU.
AutoDevice auto_device(size_t n_bytes = 0);

// Capabilities::n_batch of a device, which need not exist.
int32_t default_rows(std::string_view device);

// device: "auto" (the CPU; for models see auto_device()), "cpu", "cuda", "cuda:N", "vulkan" or
// "vulkan:N".
// n_threads: for the CPU back end; 0 = one per processor. The environment variable H2O_ISA forces
// the CPU's instruction set by name; H2O_REPACK=0 keeps weights in the file's layout.
// exact: multiply all weights in float, without rounding activations. CPU only.
// Throws InvalidArgument.
std::unique_ptr<Backend> make_backend(const std::string& device, int n_threads, bool exact = false);

}  // namespace h2o
