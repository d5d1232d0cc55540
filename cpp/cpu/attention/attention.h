// Attention over the bounded cache on the CPU: store, attend, score, choose.
#pragma once

#include <cstddef>

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "kv/view.h"

namespace h2o {

// Bytes of workspace that attend() needs with so many threads.
size_t attend_workspace(const KvView& shape, int n_threads);

// Backend::attend(). Neither the number of threads nor what else is in the batch changes a bit.
void attend(const CpuKernels& kernels, ThreadPool& pool, const Attention& attention,
            const KvView& cache, const Batch& batch);

}  // namespace h2o
