// Eviction: the last step of attention over the bounded cache.
#pragma once

#include <cstdint>

#include "backend/batch.h"
#include "cpu/attention/archive.h"
#include "cpu/kernels.h"
#include "kv/view.h"

namespace h2o {

// For a segment whose rows are in slots `kept` and up. Selects the slot of the next token: a free
// one, or that of the token to evict; returns whether a token is evicted. `importances`: scratch,
// [slots].
bool select_next_slot(const CpuKernels& kernels, const KvHead& head, const Segment& segment,
                      float* importances);

// Archives the token in the slot that select_next_slot() selected for eviction.
void archive_next_slot(const KvView& cache, const KvHead& head, const Segment& segment,
                       const ArchiveWriter& archive);

// For a segment whose rows are staged in `chunk`. Keeps `budget` of the cached and staged tokens;
// the staged tokens that are kept move into the slots of evicted ones, which go to `archive` unless
// it is nullptr. `victims`: scratch, [slots + n_rows].
void admit_chunk(const KvView& cache, const KvHead& head, const KvStaging& chunk,
                 const Segment& segment, const ArchiveWriter* archive, Victim* victims);

// Ranks the first `written` slots by position, except slot `vacant` (-1: none). `order`: scratch,
// [written].
void rank_slots(const KvHead& head, int32_t written, int32_t vacant, int32_t* order);

}  // namespace h2o
