// Attention of encoders: each row attends to its whole text, without a cache.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

namespace h2o {

// Computes Backend::attend_whole().
void attend_whole(const CpuKernels& kernels, ThreadPool& pool, const Attention& attention,
                  int64_t head_dim, const Batch& batch);

}  // namespace h2o
