#include "cuda/runtime/device_batch.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "core/error.h"
#include "core/layout.h"

namespace h2o::cuda {

BatchCopier::BatchCopier(const Stream& stream) : stream_(stream) {
  Layout most;
  for (int i = 0; i < 5; ++i) most.place(int64_t{kMaxRows} * sizeof(int32_t));
  most.place(int64_t{kMaxRows} * sizeof(Segment));
  host_ = allocate_pinned(most.size());
  device_ = allocate_device(most.size());
  check(cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming), "create an event");
}

BatchCopier::~BatchCopier() { cudaEventDestroy(copied_); }

DeviceBatch BatchCopier::copy(const Batch& batch) {
  const int32_t n_rows = batch.n_rows();
  require(n_rows <= kMaxRows && std::ssize(batch.logits_rows) <= kMaxRows, "[cuda] a batch of ",
          n_rows, " rows, at most ", kMaxRows);
  check(cudaEventSynchronize(copied_), "copy a batch");  // the last copy may still be in progress

  Layout layout;
  const auto place = [&]<class T>(std::span<const T> values) {
    const int64_t offset = layout.place(static_cast<int64_t>(values.size_bytes()));
    if (!values.empty()) std::memcpy(host_.data() + offset, values.data(), values.size_bytes());
    return reinterpret_cast<const T*>(device_.data() + offset);
  };
  DeviceBatch copy{};
  copy.alone = batch.n_turns() > 1;
  copy.tokens = place(std::span(batch.tokens));
  copy.positions = place(std::span(batch.positions));
  copy.logits_rows = place(std::span(batch.logits_rows));
  copy.temperatures = place(std::span(batch.temperatures));
  copy.segments = place(std::span(batch.segments));
  const int64_t offset = layout.place(int64_t{n_rows} * sizeof(int32_t));
  copy.segment_of = reinterpret_cast<const int32_t*>(device_.data() + offset);
  auto* segment_of = reinterpret_cast<int32_t*>(host_.data() + offset);
  for (int32_t i = 0; i < batch.n_turns(); ++i) {
    int32_t s = 0;
    for (const Segment& segment : batch.turn(i)) {
      std::fill_n(segment_of + segment.row, segment.n_rows, s++);
    }
  }
  check(cudaMemcpyAsync(device_.data(), host_.data(), layout.size(), cudaMemcpyHostToDevice,
                        stream_.get()),
        "copy a batch");
  check(cudaEventRecord(copied_, stream_.get()), "copy a batch");
  return copy;
}

}  // namespace h2o::cuda
