// The Vulkan back end. CMake compiles either it or no_vulkan.cpp, which replaces it.
// Shaders read memory at 64-bit device addresses, so Tensor::data is one, and there are no
// descriptors. Arguments are push constants. A decode step is recorded once for each number of
// sequences and submitted again for the next tokens: whatever changes is read from memory.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace h2o {

// Number of Vulkan devices that this build can use, including processors (lavapipe), which come
// last.
int vulkan_device_count();

// Throws InvalidArgument if the device does not exist.
std::unique_ptr<Backend> make_vulkan_backend(int device);

}  // namespace h2o
