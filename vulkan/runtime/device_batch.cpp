#include "vulkan/runtime/device_batch.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "core/error.h"
#include "core/layout.h"

namespace h2o::vulkan {
namespace {

constexpr int32_t kMaxRows = kMostGroups;  // a workgroup each

// Calls visit(array, offset) for each array of a batch, and returns the offset of segment_of.
template <class Visit>
int64_t lay_out(const Batch& batch, const Visit& visit) {
  Layout layout;
  const auto place = [&](const auto& values) {
    const std::span bytes = std::as_bytes(std::span(values));
    visit(bytes, layout.place(static_cast<int64_t>(bytes.size())));
  };
  place(batch.tokens);
  place(batch.positions);
  place(batch.logits_rows);
  place(batch.temperatures);
  place(batch.segments);
  return static_cast<int64_t>(layout.size());
}

size_t most_bytes() {
  Layout most;
  for (int i = 0; i < 5; ++i) most.place(int64_t{kMaxRows} * sizeof(int32_t));
  most.place(int64_t{kMaxRows} * sizeof(Segment));
  return most.size();
}

}  // namespace

BatchMemory::BatchMemory(Memory& memory)
    : buffer_(memory.allocate(Heap::Kind::host, most_bytes())),
      address_(memory.host.address(buffer_.data())) {}

DeviceBatch BatchMemory::place(const Batch& batch) const {
  require(batch.n_rows() <= kMaxRows && std::ssize(batch.logits_rows) <= kMaxRows,
          "[vulkan] a batch of ", batch.n_rows(), " rows, at most ", kMaxRows);
  uint64_t addresses[5];
  int i = 0;
  const int64_t end =
      lay_out(batch, [&](auto, int64_t offset) { addresses[i++] = address_ + offset; });
  return {addresses[0], addresses[1], address_ + end, addresses[2], addresses[3], addresses[4]};
}

void BatchMemory::write(const Batch& batch) {
  const int64_t end = lay_out(batch, [&](std::span<const std::byte> bytes, int64_t offset) {
    if (!bytes.empty()) std::memcpy(buffer_.data() + offset, bytes.data(), bytes.size());
  });
  auto* const segment_of = reinterpret_cast<int32_t*>(buffer_.data() + end);
  for (size_t s = 0; s < batch.segments.size(); ++s) {
    const Segment& segment = batch.segments[s];
    std::fill_n(segment_of + segment.row, segment.n_rows, static_cast<int32_t>(s));
  }
}

}  // namespace h2o::vulkan
