#include "vulkan/runtime/memory.h"

#include <map>
#include <span>

#include "core/error.h"

namespace h2o::vulkan {
namespace {

// Owns a part of a heap, and the device with it.
struct Owner {
  std::shared_ptr<Memory> memory;
  Heap::Kind kind;
};

void free_part(void* data, void* owner) noexcept {
  const std::unique_ptr<Owner> own(static_cast<Owner*>(owner));
  Memory& memory = *own->memory;
  try {
    memory.wait();
  } catch (const std::exception&) {  // the device was lost: nothing uses the memory any more
  }
  (own->kind == Heap::Kind::device ? memory.own : memory.host).free(static_cast<std::byte*>(data));
}

}  // namespace

std::shared_ptr<Memory> Memory::of(int index) {
  static std::mutex mutex;
  static auto* const all = new std::map<int, std::shared_ptr<Memory>>();
  const std::lock_guard lock(mutex);
  const auto found = all->find(index);
  if (found != all->end()) return found->second;
  auto memory = std::make_shared<Memory>(index);
  all->emplace(index, memory);
  return memory;
}

Memory::Memory(int index) : device(index) {
  auto type = make<VkSemaphoreTypeCreateInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO);
  type.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
  auto info = make<VkSemaphoreCreateInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO);
  info.pNext = &type;
  check(device.vk.CreateSemaphore(device.handle, &info, nullptr, &progress_), "create a semaphore");
}

Memory::~Memory() { device.vk.DestroySemaphore(device.handle, progress_, nullptr); }

Buffer Memory::allocate(Heap::Kind kind, size_t bytes) {
  if (bytes == 0) return {};
  auto owner = std::make_unique<Owner>(Owner{shared_from_this(), kind});
  const bool is_own = kind == Heap::Kind::device;
  std::byte* const data = (is_own ? own : host).allocate(bytes);
  Buffer buffer(data, bytes, free_part, owner.release());
  const std::span<const std::byte> slab = (is_own ? own : host).slab(data);
  if ((is_own ? host : own).overlaps(slab))
    throw DeviceError("[vulkan] the device has addresses that are also addresses of the host");
  return buffer;
}

uint64_t Memory::submit(VkCommandBuffer commands) {
  const std::lock_guard lock(queue_);
  const uint64_t value = submitted_ + 1;
  auto timeline =
      make<VkTimelineSemaphoreSubmitInfo>(VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO);
  timeline.signalSemaphoreValueCount = 1;
  timeline.pSignalSemaphoreValues = &value;
  auto info = make<VkSubmitInfo>(VK_STRUCTURE_TYPE_SUBMIT_INFO);
  info.pNext = &timeline;
  info.commandBufferCount = 1;
  info.pCommandBuffers = &commands;
  info.signalSemaphoreCount = 1;
  info.pSignalSemaphores = &progress_;
  check(device.vk.QueueSubmit(device.queue, 1, &info, nullptr), "submit");
  submitted_ = value;
  return value;
}

void Memory::wait_for(uint64_t value) const {
  auto info = make<VkSemaphoreWaitInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO);
  info.semaphoreCount = 1;
  info.pSemaphores = &progress_;
  info.pValues = &value;
  check(device.vk.WaitSemaphores(device.handle, &info, UINT64_MAX), "wait");
}

}  // namespace h2o::vulkan
