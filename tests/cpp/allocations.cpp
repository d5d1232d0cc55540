// The global operator new and delete, replaced by ones that count.
#include "allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> count{0};

void* counted(void* data) {
  count.fetch_add(1, std::memory_order_relaxed);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

int64_t h2o::allocations() { return count.load(std::memory_order_relaxed); }

void* operator new(size_t size) { return counted(std::malloc(size > 0 ? size : 1)); }
void* operator new[](size_t size) { return operator new(size); }
void* operator new(size_t size, std::align_val_t alignment) {
  const size_t a = static_cast<size_t>(alignment);
  return counted(std::aligned_alloc(a, (size + a - 1) / a * a));
}
void* operator new[](size_t size, std::align_val_t alignment) {
  return operator new(size, alignment);
}

void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }
void operator delete[](void* data, size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, size_t, std::align_val_t) noexcept { std::free(data); }
