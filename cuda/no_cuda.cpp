// Replaces the CUDA back end in builds without CUDA.
#include "core/error.h"
#include "cuda/cuda_backend.h"

namespace h2o {

namespace {

[[noreturn]] void refuse() {
  throw InvalidArgument("device is 'cuda', but this build has no CUDA back end: expected cpu");
}

}  // namespace

int cuda_device_count() { return 0; }

size_t cuda_free_memory(int) { refuse(); }

std::unique_ptr<Backend> make_cuda_backend(int) { refuse(); }

}  // namespace h2o
