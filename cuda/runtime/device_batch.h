// A batch in device memory.
#pragma once

#include <cstdint>
#include <span>

#include "backend/batch.h"
#include "core/buffer.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

struct DeviceBatch {
  const int32_t* tokens;       // [n_rows]
  const int32_t* positions;    // [n_rows]
  const int32_t* segment_of;   // [n_rows] index into the segments of its turn
  const int32_t* logits_rows;  // [n_logits]
  const float* temperatures;   // [n_logits], or nullptr
  const Segment* segments;     // [n_segments]
  bool alone = false;          // rows are computed as if each were alone, as there are drafts
  // Rows and segments of this turn, or of all:
  int32_t first_row = 0;
  int32_t n_rows = 0;
  int32_t n_segments = 0;

  // Returns turn i, which is not empty.
  DeviceBatch turn(const Batch& batch, int32_t i) const {
    const std::span<const Segment> own = batch.turn(i);
    DeviceBatch turn = *this;
    turn.segments += own.data() - batch.segments.data();
    turn.first_row = own.front().row;
    turn.n_rows = own.back().row + own.back().n_rows - turn.first_row;
    turn.n_segments = static_cast<int32_t>(own.size());
    return turn;
  }
};

// Copies batches to fixed device memory. The arrays' addresses depend only on their sizes, so that
// a captured graph can be replayed with the next batch of the same sizes.
class BatchCopier {
 public:
  static constexpr int32_t kMaxRows = 65536;  // the limit of a Session

  explicit BatchCopier(const Stream& stream);
  BatchCopier(const BatchCopier&) = delete;
  BatchCopier& operator=(const BatchCopier&) = delete;
  ~BatchCopier();

  // Valid until the next call. Throws InvalidArgument if there are more than kMaxRows rows.
  DeviceBatch copy(const Batch& batch);

 private:
  const Stream& stream_;
  Buffer host_;    // pinned
  Buffer device_;  // of the same size
  cudaEvent_t copied_ = nullptr;
};

}  // namespace h2o::cuda
