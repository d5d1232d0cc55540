// The answers of a build without CUDA.
#include "core/error.h"
#include "cuda/cuda_backend.h"

namespace h2o {

int cuda_device_count() { return 0; }

std::unique_ptr<Backend> make_cuda_backend(int) {
  throw InvalidArgument("this build of h2o has no CUDA back end; use device \"cpu\"");
}

}  // namespace h2o
