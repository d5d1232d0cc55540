#include "cpu/allocate.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace h2o {
namespace {

constexpr size_t kCacheLine = 64;

}  // namespace

Buffer allocate_zeros(size_t bytes) {
  if (bytes == 0) return {};
  // calloc, because the system provides zeroed pages lazily. The pointer that it returned is stored
  // in the cache line before the data.
  char* block = static_cast<char*>(std::calloc(1, bytes + 2 * kCacheLine));
  if (block == nullptr) throw OutOfMemory(text("cannot allocate ", bytes, " bytes"));
  const size_t past = reinterpret_cast<uintptr_t>(block) % kCacheLine;
  char* data = block + 2 * kCacheLine - past;
  std::memcpy(data - sizeof(block), &block, sizeof(block));
  return {data, bytes, [](void* p) noexcept {
            char* start;
            std::memcpy(&start, static_cast<char*>(p) - sizeof(start), sizeof(start));
            std::free(start);
          }};
}

}  // namespace h2o
