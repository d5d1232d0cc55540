#include "vulkan/runtime/functions.h"

#ifdef _WIN32
#include <windows.h>
#undef CreateSemaphore  // would be renamed in the files after this one in a unity build
#else
#include <dlfcn.h>
#endif

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace h2o::vulkan {
namespace {

// vkGetInstanceProcAddr of the system's loader, or of MoltenVK; nullptr if there is none.
PFN_vkGetInstanceProcAddr find_loader() {
#ifdef _WIN32
  const HMODULE library = LoadLibraryA("vulkan-1.dll");
  if (library == nullptr) return nullptr;
  return reinterpret_cast<PFN_vkGetInstanceProcAddr>(
      reinterpret_cast<void*>(GetProcAddress(library, "vkGetInstanceProcAddr")));
#else
#ifdef __APPLE__
  constexpr const char* kNames[] = {"libvulkan.1.dylib", "libMoltenVK.dylib"};
#else
  constexpr const char* kNames[] = {"libvulkan.so.1"};
#endif
  for (const char* name : kNames) {
    void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    return reinterpret_cast<PFN_vkGetInstanceProcAddr>(dlsym(library, "vkGetInstanceProcAddr"));
  }
  return nullptr;
#endif
}

const char* name_of(VkResult result) {
  switch (result) {
    case VK_ERROR_OUT_OF_HOST_MEMORY:
      return "out of host memory";
    case VK_ERROR_OUT_OF_DEVICE_MEMORY:
      return "out of device memory";
    case VK_ERROR_INITIALIZATION_FAILED:
      return "initialization failed";
    case VK_ERROR_DEVICE_LOST:
      return "the device was lost";
    case VK_ERROR_MEMORY_MAP_FAILED:
      return "memory could not be mapped";
    case VK_ERROR_EXTENSION_NOT_PRESENT:
      return "an extension is not present";
    case VK_ERROR_FEATURE_NOT_PRESENT:
      return "a feature is not present";
    case VK_ERROR_INCOMPATIBLE_DRIVER:
      return "no driver";
    case VK_ERROR_TOO_MANY_OBJECTS:
      return "too many objects";
    default:
      return "failed";
  }
}

// Does the loader, or MoltenVK without one, know an extension of instances?
bool knows(PFN_vkGetInstanceProcAddr get, std::string_view extension) {
  const auto enumerate = reinterpret_cast<PFN_vkEnumerateInstanceExtensionProperties>(
      get(nullptr, "vkEnumerateInstanceExtensionProperties"));
  uint32_t n = 0;
  if (enumerate == nullptr || enumerate(nullptr, &n, nullptr) != VK_SUCCESS) return false;
  std::vector<VkExtensionProperties> all(n);
  if (enumerate(nullptr, &n, all.data()) != VK_SUCCESS) return false;
  return std::ranges::any_of(
      all, [&](const VkExtensionProperties& one) { return one.extensionName == extension; });
}

// Creates the instance; returns why there is none.
std::string create(InstanceFunctions& vk, VkInstance& handle) {
  const auto get = find_loader();
  if (get == nullptr) return "Vulkan's loader is not installed";
  const auto create_instance =
      reinterpret_cast<PFN_vkCreateInstance>(get(nullptr, "vkCreateInstance"));
  const auto get_version =
      reinterpret_cast<PFN_vkEnumerateInstanceVersion>(get(nullptr, "vkEnumerateInstanceVersion"));
  uint32_t version = 0;
  if (create_instance == nullptr || get_version == nullptr || get_version(&version) != VK_SUCCESS ||
      version < VK_API_VERSION_1_2) {
    return "Vulkan's loader does not have version 1.2";
  }
  auto application = make<VkApplicationInfo>(VK_STRUCTURE_TYPE_APPLICATION_INFO);
  application.pEngineName = "h2o.cpp";
  application.apiVersion = VK_API_VERSION_1_2;
  auto info = make<VkInstanceCreateInfo>(VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO);
  info.pApplicationInfo = &application;
  // Where a loader has it, devices with a subset of Vulkan are found only with this extension.
  const char* const extension = "VK_KHR_portability_enumeration";
  if (knows(get, extension)) {
    info.flags = VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR;
    info.enabledExtensionCount = 1;
    info.ppEnabledExtensionNames = &extension;
  }
  const VkResult result = create_instance(&info, nullptr, &handle);
  if (result != VK_SUCCESS) return name_of(result);
#define H2O_VK_LOAD(name) vk.name = reinterpret_cast<PFN_vk##name>(get(handle, "vk" #name));
  H2O_VK_INSTANCE_FUNCTIONS(H2O_VK_LOAD)
#undef H2O_VK_LOAD
  return "";
}

}  // namespace

void check(VkResult result, const char* operation) {
  if (result == VK_SUCCESS) return;
  std::string message = concat("[vulkan] ", operation, ": ", name_of(result), " (VkResult ",
                               static_cast<int>(result), ")");
  if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY || result == VK_ERROR_OUT_OF_HOST_MEMORY)
    throw OutOfMemory(std::move(message));
  throw DeviceError(message);
}

Instance& Instance::the() {
  static Instance* const instance = [] {
    auto* made = new Instance();
    made->reason_ = create(made->vk, made->handle);
    return made;
  }();
  return *instance;
}

const Instance* Instance::get() { return the().reason_.empty() ? &the() : nullptr; }
const std::string& Instance::reason() { return the().reason_; }

}  // namespace h2o::vulkan
