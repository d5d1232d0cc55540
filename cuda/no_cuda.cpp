// Replaces the CUDA back end in builds without CUDA.
#include "core/error.h"
#include "cuda/cuda_backend.h"

namespace h2o {

int cuda_device_count() { return 0; }

std::unique_ptr<Backend> make_cuda_backend(int) {
  throw InvalidArgument("device is 'cuda', but this build has no CUDA back end: expected cpu");
}

}  // namespace h2o
