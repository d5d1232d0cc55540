// The CUDA back end. CMake compiles either the back end or no_cuda.cpp, which answers in its place.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace h2o {

// How many CUDA devices this build can use here.
int cuda_device_count();

// Throws InvalidArgument when there is no such device.
std::unique_ptr<Backend> make_cuda_backend(int device);

}  // namespace h2o
