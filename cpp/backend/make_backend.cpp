#include "backend/make_backend.h"

#include <charconv>
#include <cstdlib>

#include "core/error.h"
#include "cpu/cpu_backend.h"
#include "cuda/cuda_backend.h"
#include "vulkan/vulkan_backend.h"

namespace h2o {
namespace {

// N of a name "kind:N"; 0 without a colon, -1 if it is not a number.
int index_of(std::string_view device) {
  const size_t colon = device.find(':');
  if (colon == std::string_view::npos) return 0;
  int index = -1;
  const char* const end = device.data() + device.size();
  const auto parsed = std::from_chars(device.data() + colon + 1, end, index);
  return parsed.ec == std::errc() && parsed.ptr == end ? index : -1;
}

}  // namespace

AutoDevice auto_device(size_t n_bytes) {
  const char* const chosen = std::getenv("H2O_CUDA_AUTO");
  if (chosen == nullptr || std::string_view(chosen) != "1") return {"cpu", "", false};
  try {
    const size_t free = cuda_free_memory(0);
    if (n_bytes > free) {
      return {"cpu", concat(n_bytes, " bytes are needed, ", free, " are free on the GPU"), true};
    }
    return {"cuda", concat(n_bytes, " bytes are needed of ", free), false};
  } catch (const InvalidArgument& e) {  // no GPU, or built without CUDA
    return {"cpu", e.what(), false};
  } catch (const DeviceError& e) {
    return {"cpu", e.what(), true};
  }
}

int32_t default_rows(std::string_view device) {
  return device.starts_with("cuda") ? kCudaRows : Capabilities{}.n_batch;
}

std::unique_ptr<Backend> make_backend(const std::string& device, int n_threads, bool exact) {
  if (device == "cpu" || device == "auto") {
    const char* isa = std::getenv("H2O_ISA");
    const char* repack = std::getenv("H2O_REPACK");
    const bool is_off = repack != nullptr && std::string_view(repack) == "0";
    return make_cpu_backend(n_threads, isa != nullptr ? isa : "",
                            is_off ? Repack::never : Repack::if_it_fits, exact);
  }
  require(!exact, "exact=True requires the CPU, but device is '", device, "'");
  const std::string kind = device.substr(0, device.find(':'));
  const int index = index_of(device);
  require(index >= 0 && (kind == "cuda" || kind == "vulkan"), "device is '", device,
          "', expected auto, cpu, cuda, cuda:N, vulkan or vulkan:N");
  return kind == "cuda" ? make_cuda_backend(index) : make_vulkan_backend(index);
}

}  // namespace h2o
