// Memory of a device in slabs, each one buffer, divided by first fit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "vulkan/runtime/device.h"

namespace h2o::vulkan {

// A part of a buffer.
struct Range {
  VkBuffer buffer;
  uint64_t offset;
};

class Heap {
 public:
  // device: its own memory, addressed by device addresses. host: mapped memory, addressed by host
  // pointers; shaders can use it at `address`.
  enum class Kind { device, host };

  Heap(const Device& device, Kind kind) : device_(device), kind_(kind) {}
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;
  ~Heap();

  // Uninitialized. Throws OutOfMemory, with the numbers.
  std::byte* allocate(uint64_t bytes);
  void free(std::byte* data) noexcept;

  // Where `data`, the beginning or any part of an allocation, is; nullopt: not in this heap.
  std::optional<Range> find(const void* data) const;

  // The device address of memory of this heap.
  uint64_t address(const void* data) const;

  // The slab of memory of this heap; and whether any slab has addresses of a range.
  std::span<const std::byte> slab(const void* data) const;
  bool overlaps(std::span<const std::byte> range) const;

  uint64_t allocated() const;

 private:
  struct Slab {
    VkDeviceMemory memory = nullptr;
    VkBuffer buffer = nullptr;
    uint64_t size = 0;
    uint64_t address = 0;
    std::map<uint64_t, uint64_t> unused;  // size by offset
    std::map<uint64_t, uint64_t> used;
  };
  using Slabs = std::map<const std::byte*, Slab>;

  Slabs::iterator add_slab(uint64_t size);
  Slabs::const_iterator slab_of(const void* data) const;
  uint32_t memory_type(uint32_t allowed) const;
  void destroy(Slab& slab) const noexcept;

  const Device& device_;
  const Kind kind_;
  mutable std::mutex mutex_;
  Slabs slabs_;  // by the address of their first byte
  uint64_t allocated_ = 0;
};

}  // namespace h2o::vulkan
