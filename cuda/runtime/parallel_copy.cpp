#include "cuda/runtime/parallel_copy.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <system_error>
#include <thread>
#include <vector>

namespace h2o::cuda {
namespace {

constexpr size_t kMaxThreads = 4;
constexpr size_t kMinPart = size_t{1} << 20;  // takes longer than starting a thread

}  // namespace

void parallel_copy(std::byte* to, const std::byte* from, size_t bytes) {
  const size_t n_processors = std::max(1u, std::thread::hardware_concurrency());
  const size_t n_parts =
      std::clamp<size_t>(bytes / kMinPart, 1, std::min(n_processors, kMaxThreads));
  const size_t part = (bytes + n_parts - 1) / n_parts;
  std::vector<std::future<void>> others;  // their destructors wait
  others.reserve(n_parts);
  size_t begin = 0;
  try {
    for (; bytes - begin > part; begin += part) {
      others.push_back(std::async(std::launch::async, [to = to + begin, from = from + begin, part] {
        std::memcpy(to, from, part);
      }));
    }
  } catch (const std::system_error&) {  // the rest is copied here
  }
  std::memcpy(to + begin, from + begin, bytes - begin);
}

}  // namespace h2o::cuda
