// Attention over the bounded cache on the CPU: store, attend, score, choose.
#pragma once

#include <cstddef>

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "kv/view.h"

namespace h2o {

// Bytes of workspace that one call of attend_head() needs.
size_t attend_head_workspace(const KvView& shape);

// The new rows of `segment` join the slots of `kv_head`, each attends to the kept tokens and to
// the new rows up to itself, the probabilities are added to the scores, and what no longer fits is
// evicted. One call owns one score row: no atomics, and no dependence on the number of threads.
void attend_head(const CpuKernels& kernels, const Attention& attention, const KvView& cache,
                 const Segment& segment, int32_t kv_head, std::byte* workspace);

}  // namespace h2o
