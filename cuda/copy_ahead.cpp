#include "cuda/copy_ahead.h"

namespace h2o::cuda {

CopyAhead::CopyAhead(const Stream& kernels) : kernels_(kernels), copies_(kernels.device()) {
  for (cudaEvent_t* event : {&launched_, &copied_}) {
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "create an event");
  }
}

CopyAhead::~CopyAhead() {
  cudaStreamSynchronize(copies_.get());
  for (cudaEvent_t event : {launched_, copied_}) cudaEventDestroy(event);
}

void CopyAhead::begin(std::span<const HostCopy> copies) const {
  check(cudaEventRecord(launched_, kernels_.get()), "copy ahead");
  check(cudaStreamWaitEvent(copies_.get(), launched_, 0), "copy ahead");
  for (const HostCopy& copy : copies) {
    check(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyHostToDevice, copies_.get()),
          "copy ahead");
  }
  check(cudaEventRecord(copied_, copies_.get()), "copy ahead");
}

void CopyAhead::await() const {
  check(cudaStreamWaitEvent(kernels_.get(), copied_, 0), "wait for copies");
}

}  // namespace h2o::cuda
