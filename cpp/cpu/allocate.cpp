#include "cpu/allocate.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace h2o {
namespace {

constexpr size_t kCacheLine = 64;

}  // namespace

Buffer allocate_zeros(size_t bytes) {
  if (bytes == 0) return {};
  // calloc, because the system provides zeroed pages lazily. The pointer that it returned is stored
  // in the cache line before the data.
  char* block = static_cast<char*>(std::calloc(1, bytes + 2 * kCacheLine));
  if (block == nullptr) throw OutOfMemory(concat("cannot allocate ", bytes, " bytes"));
  const size_t past = reinterpret_cast<uintptr_t>(block) % kCacheLine;
  char* data = block + 2 * kCacheLine - past;
  std::memcpy(data - sizeof(block), &block, sizeof(block));
  return {data, bytes, [](void* p, void*) noexcept {
            char* start;
            std::memcpy(&start, static_cast<char*>(p) - sizeof(start), sizeof(start));
            std::free(start);
          }};
}

Buffer allocate_huge(size_t bytes) {
  Buffer buffer = allocate_zeros(bytes);
#ifdef __linux__
  // This is only a hint. The range has whole pages.
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(buffer.data()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(buffer.data()) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return buffer;
}

}  // namespace h2o
