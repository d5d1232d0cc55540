// A device with its memory and its queue's progress: what buffers keep alive.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "core/buffer.h"
#include "vulkan/runtime/heap.h"

namespace h2o::vulkan {

struct Memory : std::enable_shared_from_this<Memory> {
  explicit Memory(int index);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  // Uninitialized memory. A buffer may be freed by any thread, while no pass is being recorded; it
  // waits for the submitted ones. Throws OutOfMemory.
  Buffer allocate(Heap::Kind kind, size_t bytes);

  // Where memory of either heap is.
  std::optional<Range> find(const void* data) const;

  // Waits until everything that has been submitted is complete. Throws DeviceError.
  void wait() const;

  Device device;
  Heap own{device, Heap::Kind::device};
  Heap host{device, Heap::Kind::host};
  VkSemaphore progress = nullptr;      // a timeline: the number of completed submissions
  std::atomic<uint64_t> submitted{0};  // submissions so far
};

}  // namespace h2o::vulkan
