// Commands for the device: recorded, submitted, and for a repeated pass submitted again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/buffer.h"
#include "vulkan/runtime/memory.h"

namespace h2o::vulkan {

// Workgroups along each axis.
struct Grid {
  int64_t x, y = 1, z = 1;
};

// A command buffer, and the memory of the arguments that its shaders read.
class Recording {
 public:
  explicit Recording(std::shared_ptr<Memory> memory);
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording();

  // Copies `bytes` of arguments to memory that shaders can read while this exists or until
  // begin(), and returns its device address.
  uint64_t keep(const void* arguments, size_t bytes);

  void begin();
  void end();

  VkCommandBuffer commands = nullptr;
  uint64_t last_submission = 0;

 private:
  static constexpr size_t kChunk = 64 << 10;

  std::shared_ptr<Memory> memory_;
  VkCommandPool pool_ = nullptr;
  std::vector<Buffer> chunks_;  // of the host's memory, kChunk each
  size_t used_ = 0;             // bytes of all chunks
};

// Records into one recording at a time.
class Commands {
 public:
  explicit Commands(std::shared_ptr<Memory> memory);

  // Later commands see what earlier shaders wrote: call it before each operation. Commands between
  // two calls may overlap, and copies with any shaders until barrier_after_copies().
  void barrier() { needs_barrier_ = true; }
  void barrier_after_copies() { needs_barrier_ = after_copies_ = true; }

  // Launches a shader; `push` is its block of push constants. A grid with no workgroups is allowed.
  template <class Push>
  void launch(Shader shader, const std::vector<uint32_t>& constants, const Grid& grid,
              const Push& push) {
    static_assert(sizeof(Push) <= kPushBytes && sizeof(Push) % 4 == 0);
    launch(shader, constants, grid, &push, sizeof(push));
  }

  // The device address of a copy of `arguments`, for this recording.
  template <class T>
  uint64_t keep(const T& arguments) {
    return open().keep(&arguments, sizeof(arguments));
  }

  void copy(const Range& to, const Range& from, uint64_t bytes);
  void fill_zero(const Range& to, uint64_t bytes);  // a multiple of 4

  // Submits what has been recorded, if anything.
  void submit();

  // The same, and waits for it.
  void finish();

  // Records into a recording of its own from now on until take(), which ends and returns it.
  void capture();
  std::unique_ptr<Recording> take();
  void drop() { captured_.reset(); }  // after an exception in capture(), take() or between them

  // Submits a complete recording, which may have been submitted before.
  void submit(Recording& recording);

 private:
  void launch(Shader shader, const std::vector<uint32_t>& constants, const Grid& grid,
              const void* push, uint32_t bytes);
  Recording& open();
  void put_barrier(bool after_copies, VkPipelineStageFlags to, VkAccessFlags access);
  VkCommandBuffer next();

  std::shared_ptr<Memory> memory_;
  // Used in turn, so that one is recorded while the other is executed.
  std::unique_ptr<Recording> own_[2];
  int current_ = 0;
  bool is_open_ = false;
  std::unique_ptr<Recording> captured_;
  bool needs_barrier_ = false, after_copies_ = false;  // before the next command
};

}  // namespace h2o::vulkan
