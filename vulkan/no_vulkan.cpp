// Replaces the Vulkan back end in builds without it.
#include "core/error.h"
#include "vulkan/vulkan_backend.h"

namespace h2o {

int vulkan_device_count() { return 0; }

std::unique_ptr<Backend> make_vulkan_backend(int) {
  throw InvalidArgument("device is 'vulkan', but this build has no Vulkan back end: expected cpu");
}

}  // namespace h2o
