// Runs the tests. If H2O_ISA names an instruction set that this CPU does not support, or
// H2O_TEST_DEVICE a device that does not exist, exits with the status that CTest reports as
// skipped.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "cuda/cuda_backend.h"
#include "device_rig.h"
#include "testing.h"
#include "vulkan/vulkan_backend.h"

int main(int argc, char** argv) {
  const char* isa = std::getenv("H2O_ISA");
  if (isa != nullptr && !h2o::cpu_has(isa)) {
    std::printf("skipped: this CPU does not run %s\n", isa);
    return H2O_TEST_SKIPPED;
  }
  if (h2o::on_cuda() && h2o::cuda_device_count() == 0) {
    std::printf("skipped: no CUDA device that this build can use\n");
    return H2O_TEST_SKIPPED;
  }
  if (h2o::on_vulkan() && h2o::vulkan_device_count() == 0) {
    std::printf("skipped: no Vulkan device that this build can use\n");
    return H2O_TEST_SKIPPED;
  }
  return doctest::Context(argc, argv).run();
}
