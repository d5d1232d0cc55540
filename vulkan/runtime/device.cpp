#include "vulkan/runtime/device.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace h2o::vulkan {
namespace {

constexpr uint32_t kMostThreads = 256;  // of a workgroup of the shaders

// The features that the shaders and the runtime need.
struct Features {
  Features() {
    of_12.pNext = &of_11;
    all.pNext = &of_12;
  }
  Features(const Features&) = delete;

  // The required ones, each with its name.
  template <class Visit>
  void visit(const Visit& visit) {
    visit(all.features.shaderInt64, "shaderInt64");
    visit(all.features.shaderInt16, "shaderInt16");
    visit(of_12.shaderInt8, "shaderInt8");
    visit(of_11.storageBuffer16BitAccess, "storageBuffer16BitAccess");
    visit(of_12.storageBuffer8BitAccess, "storageBuffer8BitAccess");
    visit(of_12.bufferDeviceAddress, "bufferDeviceAddress");
    visit(of_12.scalarBlockLayout, "scalarBlockLayout");
    visit(of_12.timelineSemaphore, "timelineSemaphore");
  }

  VkPhysicalDeviceVulkan11Features of_11 =
      make<VkPhysicalDeviceVulkan11Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES);
  VkPhysicalDeviceVulkan12Features of_12 =
      make<VkPhysicalDeviceVulkan12Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES);
  VkPhysicalDeviceFeatures2 all =
      make<VkPhysicalDeviceFeatures2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2);
};

// The properties of a device with Vulkan 1.2.
struct Properties {
  explicit Properties(VkPhysicalDevice device) {
    all.pNext = &of_11;
    Instance::get()->vk.GetPhysicalDeviceProperties2(device, &all);
  }
  Properties(const Properties&) = delete;

  VkPhysicalDeviceVulkan11Properties of_11 = make<VkPhysicalDeviceVulkan11Properties>(
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES);
  VkPhysicalDeviceProperties2 all =
      make<VkPhysicalDeviceProperties2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2);
};

// Those that every device has.
VkPhysicalDeviceProperties properties_of(VkPhysicalDevice device) {
  auto properties =
      make<VkPhysicalDeviceProperties2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2);
  Instance::get()->vk.GetPhysicalDeviceProperties2(device, &properties);
  return properties.properties;
}

std::vector<VkPhysicalDevice> all_devices() {
  const Instance* const instance = Instance::get();
  uint32_t n = 0;
  if (instance == nullptr ||
      instance->vk.EnumeratePhysicalDevices(instance->handle, &n, nullptr) != VK_SUCCESS)
    return {};
  std::vector<VkPhysicalDevice> devices(n);
  if (instance->vk.EnumeratePhysicalDevices(instance->handle, &n, devices.data()) < VK_SUCCESS)
    return {};
  devices.resize(n);
  return devices;
}

// The names of what a device lacks; empty if it has all.
std::string lacks(VkPhysicalDevice device) {
  if (properties_of(device).apiVersion < VK_API_VERSION_1_2) return "Vulkan 1.2";
  Features features;
  Instance::get()->vk.GetPhysicalDeviceFeatures2(device, &features.all);
  std::string missing;
  const auto need = [&](bool has, const char* name) {
    if (!has) missing += concat(missing.empty() ? "" : ", ", name);
  };
  features.visit([&](VkBool32 has, const char* name) { need(has == VK_TRUE, name); });
  const Properties has(device);
  const VkPhysicalDeviceLimits& limits = has.all.properties.limits;
  constexpr VkSubgroupFeatureFlags kSums =
      VK_SUBGROUP_FEATURE_BASIC_BIT | VK_SUBGROUP_FEATURE_ARITHMETIC_BIT;
  need((has.of_11.subgroupSupportedOperations & kSums) == kSums &&
           (has.of_11.subgroupSupportedStages & VK_SHADER_STAGE_COMPUTE_BIT) != 0,
       "sums of subgroups");
  need(limits.maxComputeWorkGroupInvocations >= kMostThreads &&
           limits.maxComputeWorkGroupSize[0] >= kMostThreads,
       "workgroups of 256");
  return missing;
}

// Devices with a lower rank are preferred.
int rank(VkPhysicalDevice device) {
  switch (properties_of(device).deviceType) {
    case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:
      return 0;
    case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU:
      return 1;
    case VK_PHYSICAL_DEVICE_TYPE_CPU:
      return 3;
    default:
      return 2;
  }
}

uint32_t compute_family(VkPhysicalDevice device) {
  uint32_t n = 0;
  const auto get = Instance::get()->vk.GetPhysicalDeviceQueueFamilyProperties;
  get(device, &n, nullptr);
  std::vector<VkQueueFamilyProperties> families(n);
  get(device, &n, families.data());
  const auto found = std::ranges::find_if(families, [](const VkQueueFamilyProperties& family) {
    return (family.queueFlags & VK_QUEUE_COMPUTE_BIT) != 0;
  });
  if (found == families.end())
    throw DeviceError("[vulkan] the device has no queue for computation");
  return static_cast<uint32_t>(found - families.begin());
}

// Those of the wanted extensions that a device has.
std::vector<const char*> extensions(VkPhysicalDevice device) {
  uint32_t n = 0;
  const auto enumerate = Instance::get()->vk.EnumerateDeviceExtensionProperties;
  check(enumerate(device, nullptr, &n, nullptr), "list extensions");
  std::vector<VkExtensionProperties> all(n);
  check(enumerate(device, nullptr, &n, all.data()), "list extensions");
  std::vector<const char*> found;
  // A device with a subset of Vulkan requires that the extension is enabled.
  for (const char* name : {VK_EXT_MEMORY_BUDGET_EXTENSION_NAME, "VK_KHR_portability_subset"}) {
    const auto is = [&](const VkExtensionProperties& extension) {
      return std::strcmp(extension.extensionName, name) == 0;
    };
    if (std::ranges::any_of(all, is)) found.push_back(name);
  }
  return found;
}

VkDevice create_device(VkPhysicalDevice physical, uint32_t family,
                       const std::vector<const char*>& extensions) {
  const float priority = 1;
  auto queue = make<VkDeviceQueueCreateInfo>(VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO);
  queue.queueFamilyIndex = family;
  queue.queueCount = 1;
  queue.pQueuePriorities = &priority;
  Features features;
  features.visit([](VkBool32& needed, const char*) { needed = VK_TRUE; });
  auto info = make<VkDeviceCreateInfo>(VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO);
  info.pNext = &features.all;
  info.queueCreateInfoCount = 1;
  info.pQueueCreateInfos = &queue;
  info.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
  info.ppEnabledExtensionNames = extensions.data();
  VkDevice device = nullptr;
  check(Instance::get()->vk.CreateDevice(physical, &info, nullptr, &device), "create a device");
  return device;
}

}  // namespace

std::vector<VkPhysicalDevice> usable_devices() {
  std::vector<VkPhysicalDevice> devices = all_devices();
  std::erase_if(devices, [](VkPhysicalDevice device) { return !lacks(device).empty(); });
  std::ranges::stable_sort(devices, {}, rank);
  return devices;
}

std::string refusal(int index) {
  if (Instance::get() == nullptr)
    return concat("[vulkan] no device can be used: ", Instance::reason());
  const auto n = static_cast<int>(usable_devices().size());
  if (index >= 0 && index < n) return "";
  std::string message = concat("[vulkan] device ", index, ", this machine has ", n);
  for (const VkPhysicalDevice device : all_devices()) {
    const std::string missing = lacks(device);
    if (!missing.empty())
      message += concat("; ", properties_of(device).deviceName, " lacks ", missing);
  }
  return message;
}

Device::Device(int index) {
  const std::string reason = refusal(index);
  require(reason.empty(), reason);
  physical = usable_devices()[index];
  const Properties properties(physical);
  name = properties.all.properties.deviceName;
  most_at_once = properties.of_11.maxMemoryAllocationSize;

  family = compute_family(physical);
  const std::vector<const char*> enabled = extensions(physical);
  reports_free = std::ranges::any_of(enabled, [](const char* extension) {
    return std::strcmp(extension, VK_EXT_MEMORY_BUDGET_EXTENSION_NAME) == 0;
  });
  handle = create_device(physical, family, enabled);
  const InstanceFunctions& from = Instance::get()->vk;
#define H2O_VK_LOAD(name) \
  vk.name = reinterpret_cast<PFN_vk##name>(from.GetDeviceProcAddr(handle, "vk" #name));
  H2O_VK_DEVICE_FUNCTIONS(H2O_VK_LOAD)
#undef H2O_VK_LOAD
  vk.GetDeviceQueue(handle, family, 0, &queue);
  auto memories = make<VkPhysicalDeviceMemoryProperties2>(
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2);
  from.GetPhysicalDeviceMemoryProperties2(physical, &memories);
  memory = memories.memoryProperties;
}

Device::~Device() { vk.DestroyDevice(handle, nullptr); }

Device::Memory Device::own_memory(uint64_t allocated) const {
  auto budget = make<VkPhysicalDeviceMemoryBudgetPropertiesEXT>(
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT);
  auto memories = make<VkPhysicalDeviceMemoryProperties2>(
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2);
  if (reports_free) memories.pNext = &budget;
  Instance::get()->vk.GetPhysicalDeviceMemoryProperties2(physical, &memories);
  Memory most{0, 0};
  for (uint32_t i = 0; i < memory.memoryHeapCount; ++i) {
    const VkMemoryHeap& heap = memory.memoryHeaps[i];
    if ((heap.flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) == 0 || heap.size <= most.total) continue;
    const uint64_t used = reports_free ? budget.heapUsage[i] : allocated;
    const uint64_t all = reports_free ? budget.heapBudget[i] : heap.size;
    most = {all > used ? all - used : 0, heap.size};
  }
  return most;
}

}  // namespace h2o::vulkan
