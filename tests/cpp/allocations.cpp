// The global operator new and delete, replaced by ones that count: every form of them, for those of
// a sanitizer's library do not call each other.
#include "allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> count{0};

void* allocate(size_t size) {
  count.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size > 0 ? size : 1);
}

void* allocate(size_t size, std::align_val_t alignment) {
  count.fetch_add(1, std::memory_order_relaxed);
  const size_t a = static_cast<size_t>(alignment);
  return std::aligned_alloc(a, (size + a - 1) / a * a);
}

void* checked(void* data) {
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

int64_t h2o::allocations() { return count.load(std::memory_order_relaxed); }

using Alignment = std::align_val_t;
using NoThrow = std::nothrow_t;

void* operator new(size_t size, const NoThrow&) noexcept { return allocate(size); }
void* operator new[](size_t size, const NoThrow&) noexcept { return allocate(size); }
void* operator new(size_t size, Alignment a, const NoThrow&) noexcept { return allocate(size, a); }
void* operator new[](size_t size, Alignment a, const NoThrow&) noexcept {
  return allocate(size, a);
}
void* operator new(size_t size) { return checked(allocate(size)); }
void* operator new[](size_t size) { return checked(allocate(size)); }
void* operator new(size_t size, Alignment a) { return checked(allocate(size, a)); }
void* operator new[](size_t size, Alignment a) { return checked(allocate(size, a)); }

void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }
void operator delete[](void* data, size_t) noexcept { std::free(data); }
void operator delete(void* data, Alignment) noexcept { std::free(data); }
void operator delete[](void* data, Alignment) noexcept { std::free(data); }
void operator delete(void* data, size_t, Alignment) noexcept { std::free(data); }
void operator delete[](void* data, size_t, Alignment) noexcept { std::free(data); }
void operator delete(void* data, const NoThrow&) noexcept { std::free(data); }
void operator delete[](void* data, const NoThrow&) noexcept { std::free(data); }
void operator delete(void* data, Alignment, const NoThrow&) noexcept { std::free(data); }
void operator delete[](void* data, Alignment, const NoThrow&) noexcept { std::free(data); }
