// A batch in memory that shaders read.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/batch.h"
#include "core/buffer.h"
#include "vulkan/runtime/memory.h"

namespace h2o::vulkan {

// Device addresses.
struct DeviceBatch {
  uint64_t tokens;        // [n_rows] int32
  uint64_t positions;     // [n_rows] int32
  uint64_t segment_of;    // [n_rows] int32: index into segments
  uint64_t logits_rows;   // [n_logits] int32
  uint64_t temperatures;  // [n_logits] f32
  uint64_t segments;      // [n_segments] Segment
};

// Fixed memory for batches: the arrays' addresses depend only on their sizes, so that a recorded
// pass can be submitted again with the next batch of the same sizes.
class BatchMemory {
 public:
  explicit BatchMemory(Memory& memory);

  // Where the batch will be. Throws InvalidArgument if it is too long.
  DeviceBatch place(const Batch& batch) const;

  // Writes it there; the device must not be reading another.
  void write(const Batch& batch);

 private:
  Buffer buffer_;  // of the host's memory
  uint64_t address_;
};

}  // namespace h2o::vulkan
