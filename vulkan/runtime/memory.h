// A device with its memory, its pipelines and its queue's progress, shared by all back ends on it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>

#include "core/buffer.h"
#include "vulkan/runtime/heap.h"
#include "vulkan/runtime/pipelines.h"

namespace h2o::vulkan {

struct Memory : std::enable_shared_from_this<Memory> {
  // The device's only one, which exists until the process ends: drivers take seconds to compile the
  // shaders of a model. Throws InvalidArgument if there is no such device; DeviceError.
  static std::shared_ptr<Memory> of(int index);

  explicit Memory(int index);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  // Uninitialized memory. A buffer may be freed by any thread, while no pass is being recorded; it
  // waits for the submitted ones. No slab of one heap has addresses of the other's, so that an
  // address says which heap it is of. Throws OutOfMemory; DeviceError.
  Buffer allocate(Heap::Kind kind, size_t bytes);

  // Submits commands and returns the number of submissions so far. By any thread.
  uint64_t submit(VkCommandBuffer commands);

  // Waits until the first `value` submissions are complete. Throws DeviceError.
  void wait_for(uint64_t value) const;

  // Waits until everything that has been submitted is complete. Throws DeviceError.
  void wait() const { wait_for(submitted_); }

  Device device;
  Heap own{device, Heap::Kind::device};
  Heap host{device, Heap::Kind::host};
  Pipelines pipelines{device};

 private:
  VkSemaphore progress_ = nullptr;  // a timeline: the number of completed submissions
  std::atomic<uint64_t> submitted_{0};
  std::mutex queue_;
};

}  // namespace h2o::vulkan
