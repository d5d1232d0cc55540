// Backend::delta_net, short_conv and state_space on the CPU.
#pragma once

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "kv/view.h"

namespace h2o {

void delta_net(const CpuKernels& kernels, ThreadPool& pool, const DeltaNet& layer,
               const KvView& cache, const Batch& batch);

void short_conv(const CpuKernels& kernels, ThreadPool& pool, const ShortConv& layer,
                const KvView& cache, const Batch& batch);

void state_space(const CpuKernels& kernels, ThreadPool& pool, const StateSpace& layer,
                 const KvView& cache, const Batch& batch);

}  // namespace h2o
