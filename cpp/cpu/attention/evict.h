// Who makes room: the last part of attention over the bounded cache.
#pragma once

#include <cstdint>

#include "backend/batch.h"
#include "cpu/attention/archive.h"
#include "cpu/kernels.h"
#include "kv/view.h"

namespace h2o {

// The rows of `segment` are in the slots from kept on. Chooses the slot of the next token: a free
// one, or that of the token to evict, which is whether one is evicted. `importances`: scratch,
// [slots].
bool select_next_slot(const CpuKernels& kernels, const KvHead& head, const Segment& segment,
                      float* importances);

// The rows of `segment` wait in `chunk`. Keeps `budget` of the cached tokens and of them; the
// chunk's survivors move into the slots of the evicted, which go to `archive` unless it is nullptr.
// `victims`: scratch, [slots + n_rows].
void admit_chunk(const KvView& cache, const KvHead& head, const KvStaging& chunk,
                 const Segment& segment, const ArchiveWriter* archive, Victim* victims);

// Ranks the first `written` slots by position, all but the `dead` one (-1: none is). `order` is
// scratch for `written` slots.
void rank_slots(const KvHead& head, int32_t written, int32_t dead, int32_t* order);

}  // namespace h2o
