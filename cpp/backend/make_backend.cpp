#include "backend/make_backend.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "cpu/cpu_backend.h"
#include "cuda/cuda_backend.h"

namespace h2o {

std::unique_ptr<Backend> make_backend(const std::string& device, int n_threads, bool exact) {
  // "auto" is the CPU until the CUDA back end has been measured on a GPU.
  if (device == "cpu" || device == "auto") {
    const char* isa = std::getenv("H2O_ISA");
    const char* repack = std::getenv("H2O_REPACK");
    return make_cpu_backend(n_threads, isa != nullptr ? isa : "",
                            repack == nullptr || std::string_view(repack) != "0", exact);
  }
  require(!exact, "exact is for the CPU, device is '", device, "'");
  if (device == "cuda") return make_cuda_backend(0);

  int index = -1;
  if (device.starts_with("cuda:")) {
    const char* end = device.data() + device.size();
    const auto parsed = std::from_chars(device.data() + 5, end, index);
    if (parsed.ec != std::errc() || parsed.ptr != end) index = -1;
  }
  require(index >= 0, "device is '", device, "', expected auto, cpu, cuda or cuda:N");
  return make_cuda_backend(index);
}

}  // namespace h2o
