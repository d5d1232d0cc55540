// Attention over the bounded cache on the CPU: store, attend, score, select victims.
#pragma once

#include <cstddef>

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "kv/view.h"

namespace h2o {

// Bytes of workspace that attend() needs with n_threads threads.
size_t attend_workspace(const CpuKernels& kernels, const KvView& shape, int n_threads);

// Backend::attend(); returns what it adds to n_clamped(). Results do not depend, bit for bit, on
// the number of threads or the rest of the batch.
int64_t attend(const CpuKernels& kernels, ThreadPool& pool, const Attention& attention,
               const KvView& cache, const Batch& batch);

}  // namespace h2o
