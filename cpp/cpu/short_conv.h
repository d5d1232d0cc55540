// Backend::short_conv on the CPU.
#pragma once

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "kv/view.h"

namespace h2o {

void short_conv(const CpuKernels& kernels, ThreadPool& pool, const ShortConv& layer,
                const KvView& cache, const Batch& batch);

}  // namespace h2o
