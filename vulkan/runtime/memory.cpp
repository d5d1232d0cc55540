#include "vulkan/runtime/memory.h"

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

Memory::Memory(int index) : device(index) {
  auto type = make<VkSemaphoreTypeCreateInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO);
  type.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
  auto info = make<VkSemaphoreCreateInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO);
  info.pNext = &type;
  check(device.vk.CreateSemaphore(device.handle, &info, nullptr, &progress), "create a semaphore");
}

Memory::~Memory() { device.vk.DestroySemaphore(device.handle, progress, nullptr); }

Buffer Memory::allocate(Heap::Kind kind, size_t bytes) {
  if (bytes == 0) return {};
  auto owner = std::make_unique<Owner>(Owner{shared_from_this(), kind});
  std::byte* const data = (kind == Heap::Kind::device ? own : host).allocate(bytes);
  return {data, bytes, free_part, owner.release()};
}

std::optional<Range> Memory::find(const void* data) const {
  const std::optional<Range> range = own.find(data);
  return range ? range : host.find(data);
}

void Memory::wait() const {
  const uint64_t value = submitted;
  auto info = make<VkSemaphoreWaitInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO);
  info.semaphoreCount = 1;
  info.pSemaphores = &progress;
  info.pValues = &value;
  check(device.vk.WaitSemaphores(device.handle, &info, UINT64_MAX), "wait");
}

}  // namespace h2o::vulkan
