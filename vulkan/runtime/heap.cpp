#include "vulkan/runtime/heap.h"

#include <algorithm>
#include <iterator>

#include "core/error.h"

namespace h2o::vulkan {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kSlab = uint64_t{16} << 20;  // larger allocations have a slab of their own

// Takes `size` bytes from the first unused part that has them.
std::optional<uint64_t> take(std::map<uint64_t, uint64_t>& unused, uint64_t size) {
  const auto found =
      std::ranges::find_if(unused, [&](const auto& part) { return part.second >= size; });
  if (found == unused.end()) return std::nullopt;
  const auto [offset, left] = *found;
  unused.erase(found);
  if (left > size) unused[offset + size] = left - size;
  return offset;
}

// Returns a part, merged with unused neighbors.
void give_back(std::map<uint64_t, uint64_t>& unused, uint64_t offset, uint64_t size) {
  auto next = unused.lower_bound(offset);
  if (next != unused.end() && next->first == offset + size) {
    size += next->second;
    next = unused.erase(next);
  }
  if (next != unused.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  unused[offset] = size;
}

}  // namespace

Heap::~Heap() {
  for (auto& [data, slab] : slabs_) destroy(slab);
}

std::byte* Heap::allocate(uint64_t bytes) {
  const uint64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard lock(mutex_);
  auto slab = slabs_.begin();
  std::optional<uint64_t> offset;
  for (; slab != slabs_.end(); ++slab) {
    offset = take(slab->second.unused, size);
    if (offset) break;
  }
  if (!offset) {
    slab = add_slab(std::max(size, kSlab));
    offset = take(slab->second.unused, size);
  }
  slab->second.used[*offset] = size;
  allocated_ += size;
  return const_cast<std::byte*>(slab->first) + *offset;
}

void Heap::free(std::byte* data) noexcept {
  const std::lock_guard lock(mutex_);
  const auto slab = std::prev(slabs_.upper_bound(data));
  Slab& in = slab->second;
  const auto part = in.used.find(static_cast<uint64_t>(data - slab->first));
  give_back(in.unused, part->first, part->second);
  allocated_ -= part->second;
  in.used.erase(part);
  if (!in.used.empty()) return;
  destroy(in);
  slabs_.erase(slab);
}

std::optional<Range> Heap::find(const void* data) const {
  const std::lock_guard lock(mutex_);
  const auto slab = slab_of(data);
  if (slab == slabs_.end()) return std::nullopt;
  const auto offset = static_cast<const std::byte*>(data) - slab->first;
  return Range{slab->second.buffer, static_cast<uint64_t>(offset)};
}

uint64_t Heap::address(const void* data) const {
  const std::lock_guard lock(mutex_);
  const auto slab = slab_of(data);
  return slab->second.address +
         static_cast<uint64_t>(static_cast<const std::byte*>(data) - slab->first);
}

std::span<const std::byte> Heap::slab(const void* data) const {
  const std::lock_guard lock(mutex_);
  const auto slab = slab_of(data);
  return {slab->first, slab->second.size};
}

bool Heap::overlaps(std::span<const std::byte> range) const {
  const std::lock_guard lock(mutex_);
  const std::byte* const end = range.data() + range.size();
  return std::ranges::any_of(slabs_, [&](const auto& slab) {
    return slab.first < end && range.data() < slab.first + slab.second.size;
  });
}

uint64_t Heap::allocated() const {
  const std::lock_guard lock(mutex_);
  return allocated_;
}

Heap::Slabs::const_iterator Heap::slab_of(const void* data) const {
  const auto* const at = static_cast<const std::byte*>(data);
  auto slab = slabs_.upper_bound(at);
  if (slab == slabs_.begin()) return slabs_.end();
  --slab;
  return at < slab->first + slab->second.size ? slab : slabs_.end();
}

uint32_t Heap::memory_type(uint32_t allowed) const {
  constexpr VkMemoryPropertyFlags kMapped =
      VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
  // The wanted properties, best first.
  const VkMemoryPropertyFlags own[] = {VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, 0};
  const VkMemoryPropertyFlags host[] = {kMapped | VK_MEMORY_PROPERTY_HOST_CACHED_BIT, kMapped};
  for (const VkMemoryPropertyFlags flags : kind_ == Kind::device ? own : host) {
    for (uint32_t i = 0; i < device_.memory.memoryTypeCount; ++i) {
      const VkMemoryPropertyFlags has = device_.memory.memoryTypes[i].propertyFlags;
      if ((allowed >> i & 1) != 0 && (has & flags) == flags) return i;
    }
  }
  throw DeviceError("[vulkan] the device has no memory of the kind that is needed");
}

Heap::Slabs::iterator Heap::add_slab(uint64_t size) {
  if (size > device_.most_at_once) {
    throw OutOfMemory(concat("[vulkan] an allocation of ", size, " bytes, at most ",
                             device_.most_at_once, " on this device"));
  }
  Slab slab;
  slab.size = size;
  slab.unused[0] = size;
  auto buffer = make<VkBufferCreateInfo>(VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO);
  buffer.size = size;
  buffer.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                 VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT;
  std::byte* data = nullptr;
  try {
    check(device_.vk.CreateBuffer(device_.handle, &buffer, nullptr, &slab.buffer), "allocate");
    VkMemoryRequirements needs{};
    device_.vk.GetBufferMemoryRequirements(device_.handle, slab.buffer, &needs);
    auto flags = make<VkMemoryAllocateFlagsInfo>(VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO);
    flags.flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT;
    auto info = make<VkMemoryAllocateInfo>(VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO);
    info.pNext = &flags;
    info.allocationSize = needs.size;
    info.memoryTypeIndex = memory_type(needs.memoryTypeBits);
    const VkResult result = device_.vk.AllocateMemory(device_.handle, &info, nullptr, &slab.memory);
    if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY || result == VK_ERROR_OUT_OF_HOST_MEMORY) {
      const auto [free, total] = device_.own_memory(allocated_);
      throw OutOfMemory(concat("[vulkan] cannot allocate ", size, " bytes; the device has ", total,
                               ", of which ", free, " are free"));
    }
    check(result, "allocate");
    check(device_.vk.BindBufferMemory(device_.handle, slab.buffer, slab.memory, 0), "allocate");
    auto at = make<VkBufferDeviceAddressInfo>(VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO);
    at.buffer = slab.buffer;
    slab.address = device_.vk.GetBufferDeviceAddress(device_.handle, &at);
    data = reinterpret_cast<std::byte*>(slab.address);
    if (kind_ == Kind::host) {
      void* mapped = nullptr;
      check(device_.vk.MapMemory(device_.handle, slab.memory, 0, VK_WHOLE_SIZE, 0, &mapped), "map");
      data = static_cast<std::byte*>(mapped);
    }
    return slabs_.emplace(data, std::move(slab)).first;
  } catch (...) {
    destroy(slab);
    throw;
  }
}

void Heap::destroy(Slab& slab) const noexcept {
  device_.vk.DestroyBuffer(device_.handle, slab.buffer, nullptr);
  device_.vk.FreeMemory(device_.handle, slab.memory, nullptr);  // which unmaps it
}

}  // namespace h2o::vulkan
