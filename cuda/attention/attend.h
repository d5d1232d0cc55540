// The steps of attend() on the device, in order.
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

// Limit, because a thread keeps its part of a head in registers.
constexpr int32_t kMaxHeadDim = 1024;

// Rotates q and k of a turn's rows, and stores the rows in free slots if they fit, otherwise in the
// staging area.
void store_kv(const Stream& stream, const Attention& attention, const KvView& cache,
              const DeviceBatch& batch);

// Which kinds of one-row segments a batch has: those whose keys are rotated when read, and others.
// And how many slots they may have in use. A captured step is identified by its number of rows and
// these.
struct DecodeKinds {
  explicit DecodeKinds(std::span<const Segment> segments) {
    for (const Segment& segment : segments) {
      if (segment.n_rows > 1) continue;
      (segment.rolling ? rolling : fixed) = true;
      while (in_use < kMostInUse && in_use <= segment.position) in_use *= 4;
    }
  }

  // With more slots in use, the number of splits is the same.
  static constexpr int32_t kMostInUse = 65536;

  bool fixed = false;
  bool rolling = false;
  int32_t in_use = 64;  // rounded up to a power of four, up to kMostInUse: few kinds of steps
};

// For segments of one row: attention, score update, and selection of the next slot. Other segments
// are skipped. `rounded`: receives the rounded output, if all segments have one row and it is not
// empty. `recalled`: archive contributions, by sequence.
// decode_workspace: bytes of cache.workspace that it uses, from its start.
size_t decode_workspace(const KvView& shape);
void decode(const Stream& stream, const Attention& attention, const KvView& cache,
            const DeviceBatch& batch, DecodeKinds kinds, const QuantizedRows& rounded,
            const RecalledSums& recalled);

// After the rows of `segment` have attended: selects the next slot and, if the rows did not fit,
// the tokens to keep. `archives`: evicted tokens are archived. admit_workspace: see
// decode_workspace.
size_t admit_workspace(const KvView& shape);
void admit(const Stream& stream, const KvView& cache, const Segment& segment, bool archives);

// Backend::compute_rope_table and Backend::roll
void compute_rope_table(const Stream& stream, const Tensor& rope_table, const Rope& rope);
void roll(const Stream& stream, const KvView& cache, const Rope& rope, int32_t sequence,
          int32_t length);

// Bytes of cache.workspace that prefill_attention() uses, from its start.
size_t prefill_workspace(const KvView& shape);

// The rows of `segment` attend to the cached tokens and to the rows up to themselves. q is rotated;
// keys and values are located by SegmentKeys. Adds their probabilities to the scores, if the policy
// uses scores. `recalls`: the workspace of recall() if they also attend to the archive; else
// nullptr. `operands`: also receives the output as halves, if prefills_on_tiles() and nothing is
// recalled.
void prefill_attention(const Stream& stream, const Attention& attention, const KvView& cache,
                       const Segment& segment, std::byte* recalls, const Operands& operands);
bool prefills_on_tiles(const KvView& cache);

// Archives, for segments of one row, the tokens in their next slots, if they were evicted.
void archive_evicted(const Stream& stream, const KvView& cache, const DeviceBatch& batch);

// Archives a longer segment's, after eviction has been decided and before slots are overwritten.
void archive_evicted(const Stream& stream, const KvView& cache, const Segment& segment);

}  // namespace h2o::cuda
