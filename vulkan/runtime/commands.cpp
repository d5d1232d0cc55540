#include "vulkan/runtime/commands.h"

#include <utility>

#include "core/error.h"

namespace h2o::vulkan {
Recording::Recording(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {
  auto pool = make<VkCommandPoolCreateInfo>(VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO);
  pool.flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT;
  pool.queueFamilyIndex = memory_->device.family;
  check(memory_->device.vk.CreateCommandPool(memory_->device.handle, &pool, nullptr, &pool_),
        "create commands");
  auto info = make<VkCommandBufferAllocateInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO);
  info.commandPool = pool_;
  info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
  info.commandBufferCount = 1;
  const Device& device = memory_->device;
  const VkResult result = device.vk.AllocateCommandBuffers(device.handle, &info, &commands);
  if (result != VK_SUCCESS) device.vk.DestroyCommandPool(device.handle, pool_, nullptr);
  check(result, "create commands");
}

Recording::~Recording() {
  const Device& device = memory_->device;
  try {
    memory_->wait();                 // it may be executed
  } catch (const std::exception&) {  // the device was lost
  }
  device.vk.DestroyCommandPool(device.handle, pool_, nullptr);
}

uint64_t Recording::keep(const void* arguments, size_t bytes) {
  const size_t size = (bytes + 15) / 16 * 16;
  if (used_ % kChunk + size > kChunk) used_ = (used_ + kChunk - 1) / kChunk * kChunk;
  if (used_ / kChunk == chunks_.size())
    chunks_.push_back(memory_->allocate(Heap::Kind::host, kChunk));
  std::byte* const to = chunks_[used_ / kChunk].data() + used_ % kChunk;
  used_ += size;
  std::memcpy(to, arguments, bytes);
  return memory_->host.address(to);
}

void Recording::begin() {
  used_ = 0;
  const auto info = make<VkCommandBufferBeginInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO);
  check(memory_->device.vk.BeginCommandBuffer(commands, &info), "record");
}

void Recording::end() { check(memory_->device.vk.EndCommandBuffer(commands), "record"); }

Commands::Commands(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {
  for (auto& recording : own_) recording = std::make_unique<Recording>(memory_);
}

Recording& Commands::open() {
  if (captured_ != nullptr) return *captured_;
  Recording& recording = *own_[current_];
  if (is_open_) return recording;
  memory_->wait_for(recording.last_submission);
  recording.begin();
  is_open_ = true;
  barrier_after_copies();
  return recording;
}

void Commands::put_barrier(bool after_copies, VkPipelineStageFlags to, VkAccessFlags access) {
  VkPipelineStageFlags from = VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT;
  auto memory = make<VkMemoryBarrier>(VK_STRUCTURE_TYPE_MEMORY_BARRIER);
  memory.srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT;
  if (after_copies) {
    from |= VK_PIPELINE_STAGE_TRANSFER_BIT;
    memory.srcAccessMask |= VK_ACCESS_TRANSFER_WRITE_BIT;
  }
  memory.dstAccessMask = access;
  memory_->device.vk.CmdPipelineBarrier(open().commands, from, to, 0, 1, &memory, 0, nullptr, 0,
                                        nullptr);
}

VkCommandBuffer Commands::next() {
  const VkCommandBuffer commands = open().commands;
  if (std::exchange(needs_barrier_, false)) {
    put_barrier(std::exchange(after_copies_, false),
                VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT,
                VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT |
                    VK_ACCESS_TRANSFER_READ_BIT | VK_ACCESS_TRANSFER_WRITE_BIT);
  }
  return commands;
}

void Commands::launch(Shader shader, const std::vector<uint32_t>& constants, const Grid& grid,
                      const void* push, uint32_t bytes) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const Device& device = memory_->device;
  for (const int64_t n : {grid.x, grid.y, grid.z}) {
    require(n <= kMostGroups, "[vulkan] an operation of ", n, " workgroups, at most ", kMostGroups);
  }
  const VkPipeline pipeline = memory_->pipelines.get(shader, constants);
  const VkCommandBuffer commands = next();
  device.vk.CmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline);
  device.vk.CmdPushConstants(commands, memory_->pipelines.layout(), VK_SHADER_STAGE_COMPUTE_BIT, 0,
                             bytes, push);
  device.vk.CmdDispatch(commands, static_cast<uint32_t>(grid.x), static_cast<uint32_t>(grid.y),
                        static_cast<uint32_t>(grid.z));
}

void Commands::copy(const Range& to, const Range& from, uint64_t bytes) {
  const VkBufferCopy copy{from.offset, to.offset, bytes};
  memory_->device.vk.CmdCopyBuffer(next(), from.buffer, to.buffer, 1, &copy);
}

void Commands::fill_zero(const Range& to, uint64_t bytes) {
  memory_->device.vk.CmdFillBuffer(next(), to.buffer, to.offset, bytes, 0);
}

void Commands::submit() {
  if (!is_open_) return;
  Recording& recording = *own_[current_];
  put_barrier(true, VK_PIPELINE_STAGE_HOST_BIT, VK_ACCESS_HOST_READ_BIT);
  is_open_ = false;
  recording.end();
  submit(recording);
  current_ ^= 1;
}

void Commands::finish() {
  submit();
  memory_->wait();
}

void Commands::capture() {
  submit();
  captured_ = std::make_unique<Recording>(memory_);
  captured_->begin();
  barrier_after_copies();
}

std::unique_ptr<Recording> Commands::take() {
  put_barrier(true, VK_PIPELINE_STAGE_HOST_BIT, VK_ACCESS_HOST_READ_BIT);
  captured_->end();
  return std::move(captured_);
}

void Commands::submit(Recording& recording) {
  recording.last_submission = memory_->submit(recording.commands);
}

}  // namespace h2o::vulkan
