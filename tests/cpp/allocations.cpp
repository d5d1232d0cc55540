// Replaces the global operator new and delete by versions that count and can fail: every overload,
// because those of a sanitizer's library do not call each other. On Linux the linker redirects the
// library's malloc and calloc to ours. Not on Windows: GCC's thread-local variables call malloc
// there, so ours would recurse.
#include "allocations.h"

#ifdef _WIN32
#include <malloc.h>
#endif

#include <atomic>
#include <cstdlib>
#include <new>

#ifdef __linux__
extern "C" void* __real_malloc(size_t size);
extern "C" void* __real_calloc(size_t n, size_t size);
#else
#define __real_malloc std::malloc
#endif

namespace {

std::atomic<int64_t> count{0};

thread_local int64_t n_left = 0;  // calls until one fails; 0: none does
thread_local bool only_one = true;
thread_local bool has_failed = false;

// Counts a call, and returns whether it must fail.
bool fails() {
  count.fetch_add(1, std::memory_order_relaxed);
  if (n_left == 0 || --n_left > 0) return false;
  if (!only_one) n_left = 1;
  return has_failed = true;
}

void* allocate(size_t size) {
  if (fails()) return nullptr;
  return __real_malloc(size > 0 ? size : 1);
}

void* allocate(size_t size, std::align_val_t alignment) {
  if (fails()) return nullptr;
  const size_t a = static_cast<size_t>(alignment);
#ifdef _WIN32
  return _aligned_malloc(size, a);
#else
  return std::aligned_alloc(a, (size + a - 1) / a * a);
#endif
}

void free_aligned(void* data) {
#ifdef _WIN32
  _aligned_free(data);
#else
  std::free(data);
#endif
}

void* checked(void* data) {
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

#ifdef __linux__
extern "C" void* __wrap_malloc(size_t size) { return fails() ? nullptr : __real_malloc(size); }
extern "C" void* __wrap_calloc(size_t n, size_t size) {
  return fails() ? nullptr : __real_calloc(n, size);
}
#endif

int64_t h2o::allocations() { return count.load(std::memory_order_relaxed); }

h2o::FailingAllocation::FailingAllocation(int64_t n, bool only) {
  n_left = n;
  only_one = only;
  has_failed = false;
}

h2o::FailingAllocation::~FailingAllocation() { n_left = 0; }

bool h2o::FailingAllocation::failed() const { return has_failed; }

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
void operator delete(void* data, Alignment) noexcept { free_aligned(data); }
void operator delete[](void* data, Alignment) noexcept { free_aligned(data); }
void operator delete(void* data, size_t, Alignment) noexcept { free_aligned(data); }
void operator delete[](void* data, size_t, Alignment) noexcept { free_aligned(data); }
void operator delete(void* data, const NoThrow&) noexcept { std::free(data); }
void operator delete[](void* data, const NoThrow&) noexcept { std::free(data); }
void operator delete(void* data, Alignment, const NoThrow&) noexcept { free_aligned(data); }
void operator delete[](void* data, Alignment, const NoThrow&) noexcept { free_aligned(data); }
