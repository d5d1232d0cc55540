#include "cuda/runtime/copy_async.h"

namespace h2o::cuda {

AsyncCopy::AsyncCopy(const Stream& kernels) : kernels_(kernels), copies_(kernels.device()) {
  for (cudaEvent_t* event : {&launched_, &copied_}) {
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "create an event");
  }
}

AsyncCopy::~AsyncCopy() {
  cudaStreamSynchronize(copies_.get());
  for (cudaEvent_t event : {launched_, copied_}) cudaEventDestroy(event);
}

void AsyncCopy::begin(std::span<const HostCopy> copies) const {
  check(cudaEventRecord(launched_, kernels_.get()), "copy ahead");
  check(cudaStreamWaitEvent(copies_.get(), launched_, 0), "copy ahead");
  for (const HostCopy& copy : copies) {
    check(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyHostToDevice, copies_.get()),
          "copy ahead");
  }
  check(cudaEventRecord(copied_, copies_.get()), "copy ahead");
}

void AsyncCopy::await() const {
  check(cudaStreamWaitEvent(kernels_.get(), copied_, 0), "wait for copies");
}

}  // namespace h2o::cuda
