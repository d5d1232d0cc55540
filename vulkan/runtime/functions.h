// The functions of Vulkan's loader, which is found at run time: nothing is linked with it.
#pragma once

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan.h>

#include <cstdint>
#include <string>

namespace h2o::vulkan {

static_assert(sizeof(void*) == 8, "Tensor::data holds 64-bit device addresses");

// X(name without "vk"): functions of an instance, and those of a device.
// clang-format off
#define H2O_VK_INSTANCE_FUNCTIONS(X)                                             \
  X(EnumeratePhysicalDevices) X(GetPhysicalDeviceProperties2)                    \
  X(GetPhysicalDeviceFeatures2) X(GetPhysicalDeviceMemoryProperties2)            \
  X(GetPhysicalDeviceQueueFamilyProperties) X(EnumerateDeviceExtensionProperties) \
  X(CreateDevice) X(GetDeviceProcAddr)
#define H2O_VK_DEVICE_FUNCTIONS(X)                                               \
  X(DestroyDevice) X(GetDeviceQueue) X(QueueSubmit) X(AllocateMemory)            \
  X(FreeMemory) X(MapMemory) X(CreateBuffer) X(DestroyBuffer)                    \
  X(GetBufferMemoryRequirements) X(BindBufferMemory) X(GetBufferDeviceAddress)   \
  X(CreateShaderModule) X(DestroyShaderModule) X(CreatePipelineLayout)           \
  X(DestroyPipelineLayout) X(CreateComputePipelines) X(DestroyPipeline)          \
  X(CreateCommandPool) X(DestroyCommandPool) X(AllocateCommandBuffers)           \
  X(BeginCommandBuffer) X(EndCommandBuffer) X(CreateSemaphore)                   \
  X(DestroySemaphore) X(WaitSemaphores) X(CmdBindPipeline) X(CmdPushConstants)   \
  X(CmdDispatch) X(CmdPipelineBarrier) X(CmdCopyBuffer) X(CmdFillBuffer)
// clang-format on

#define H2O_VK_MEMBER(name) PFN_vk##name name = nullptr;
struct InstanceFunctions {
  H2O_VK_INSTANCE_FUNCTIONS(H2O_VK_MEMBER)
};
struct DeviceFunctions {
  H2O_VK_DEVICE_FUNCTIONS(H2O_VK_MEMBER)
};
#undef H2O_VK_MEMBER

// A structure with this type and zeros.
template <class T>
T make(VkStructureType type) {
  T structure{};
  structure.sType = type;
  return structure;
}

// Throws OutOfMemory or DeviceError, "[vulkan] operation: the result's name", unless it is success.
void check(VkResult result, const char* operation);

// The process's instance of Vulkan 1.2. It is never destroyed: drivers may be unloaded before
// static objects are.
class Instance {
 public:
  // The instance, or nullptr if there is no loader or no driver; reason() says which.
  static const Instance* get();
  static const std::string& reason();

  InstanceFunctions vk;
  VkInstance handle = nullptr;

 private:
  Instance() = default;
  static Instance& the();

  std::string reason_;
};

}  // namespace h2o::vulkan
