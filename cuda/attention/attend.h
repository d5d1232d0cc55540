// The steps of attend() on the device, in their order.
#pragma once

#include <cstddef>
#include <span>

#include "backend/backend.h"
#include "cuda/attention/recall.h"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"
#include "kv/view.h"

namespace h2o::cuda {

// Larger heads are refused: a thread keeps its part of one in registers.
constexpr int32_t kMaxHeadDim = 1024;

// Rotates q and k, and stores the rows: where they fit in free slots, else in the chunk.
void enter(const Stream& stream, const Attention& attention, const KvView& cache,
           const DeviceBatch& batch);

// Which segments of one row a batch has: those whose keys are rotated as they are read, and others.
// A recorded step is one of a number of rows and of these.
struct DecodeKinds {
  explicit DecodeKinds(std::span<const Segment> segments) {
    for (const Segment& segment : segments) {
      if (segment.n_rows == 1) (segment.rolling ? rolling : fixed) = true;
    }
  }
  bool fixed = false;
  bool rolling = false;
};

// Segments of one row: attention, scores, and the choice of the next slot. The others are left out.
// `rounded`: the output once more, if there are no others and there is a place for it. `recalled`:
// what the segments add of the archive, by their sequences.
// decode_workspace: the bytes of cache.workspace that it needs, from its start.
size_t decode_workspace(const KvView& shape);
void decode(const Stream& stream, const Attention& attention, const KvView& cache,
            const DeviceBatch& batch, int32_t n_segments, DecodeKinds kinds,
            const QuantizedRows& rounded, const RecalledSums& recalled);

// After the rows of `segment` have attended: chooses the next slot, and where they did not fit, who
// stays. `archives`: what is evicted goes to the archive. admit_workspace: as decode_workspace.
size_t admit_workspace(const KvView& shape);
void admit(const Stream& stream, const KvView& cache, const Segment& segment, bool archives);

// Backend::compute_rope_table and Backend::roll
void compute_rope_table(const Stream& stream, const Tensor& rope_table, const Rope& rope);
void roll(const Stream& stream, const KvView& cache, const Rope& rope, int32_t sequence,
          int32_t length);

}  // namespace h2o::cuda
