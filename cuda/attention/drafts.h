// Drafts: what they overwrite is copied to the journal, and back.
#pragma once

#include <cstdint>

#include "cuda/matmul/matvec.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"
#include "kv/journal.h"
#include "kv/view.h"

namespace h2o::cuda {

constexpr int32_t kMostDrafts = kMatvecRows - 1;  // of a batch

// A Retraction, passed by value.
struct Retracted {
  int32_t sequence, length, n;
  int32_t entries[kMostDrafts];
};

// Copies what the drafts of a turn will overwrite in a layer's slots, or in its recurrent states.
// `archives`: the tokens that they evict will be archived.
void record_drafts(const Stream& stream, const KvView& cache, const KvUndo& undo,
                   const DeviceBatch& drafts, bool archives);
void record_states(const Stream& stream, const KvView& cache, const KvUndo& undo,
                   const DeviceBatch& drafts);

// Backend::retract of one layer.
void retract(const Stream& stream, const KvView& cache, const KvUndo& undo,
             const Retraction& drafts);

// Removes the tokens that drafts have evicted from the archive, before retract() restores slots.
void remove_archived(const Stream& stream, const KvView& cache, const KvUndo& undo,
                     const Retracted& drafts);

}  // namespace h2o::cuda
