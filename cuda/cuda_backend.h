// The CUDA back end. CMake compiles either it or no_cuda.cpp, which replaces it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backend/backend.h"

namespace h2o {

inline constexpr int32_t kCudaRows = 2048;  // its Capabilities::n_batch

// Number of CUDA devices that this build can use.
int cuda_device_count();

// Free bytes of a device's memory. Throws InvalidArgument, DeviceError.
size_t cuda_free_memory(int device);

// Throws InvalidArgument if the device does not exist.
std::unique_ptr<Backend> make_cuda_backend(int device);

}  // namespace h2o
