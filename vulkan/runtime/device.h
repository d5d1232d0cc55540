// A Vulkan device with one queue for computation and copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "vulkan/runtime/functions.h"

namespace h2o::vulkan {

// Workgroups along each axis, which every device can launch.
constexpr int32_t kMostGroups = 65535;

// The devices that have what the shaders need: discrete GPUs first, processors (lavapipe) last.
std::vector<VkPhysicalDevice> usable_devices();

// Why device `index` cannot be chosen, for an error message; empty if it can.
std::string refusal(int index);

class Device {
 public:
  // Throws InvalidArgument if there is no such device; DeviceError.
  explicit Device(int index);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  DeviceFunctions vk;
  VkDevice handle = nullptr;
  VkQueue queue = nullptr;
  uint32_t family = 0;  // of the queue
  VkPhysicalDeviceMemoryProperties memory{};
  std::string name;           // e.g. "llvmpipe (LLVM 15.0.6, 256 bits)"
  uint64_t most_at_once = 0;  // bytes of one allocation
  bool reports_free = false;  // VK_EXT_memory_budget
  VkPhysicalDevice physical = nullptr;

  // Free and total bytes of the device's own memory; free is an estimate without reports_free.
  struct Memory {
    uint64_t free, total;
  };
  Memory own_memory(uint64_t allocated) const;
};

}  // namespace h2o::vulkan
