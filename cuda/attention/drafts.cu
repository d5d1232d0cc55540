// Drafts: what they overwrite is copied to the journal, and back.
#include <algorithm>

#include "cuda/attention/attend.h"
#include "cuda/attention/drafts.h"
#include "cuda/runtime/copy_bytes.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStateFloats = 16 * kThreads;  // per block

__device__ void copy_state(float* to, const float* from, int64_t n_floats) {
  const int64_t first = int64_t{blockIdx.y} * kStateFloats;
  const int64_t end = min(first + kStateFloats, n_floats);
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) to[i] = from[i];
}

// One block per (draft, kv_head, change).
__global__ void __launch_bounds__(kThreads)
    record_kernel(KvView cache, KvUndo undo, const Segment* drafts, bool archives) {
  let_next_start();
  wait_for_previous();
  const Segment draft = drafts[blockIdx.x];
  const KvHead head = cache.head(draft.sequence, blockIdx.y);
  std::byte* const entry = undo.entry(cache, draft.entry, blockIdx.y);
  const KvChange change =
      KvUndo::change(cache, head, *head.next_slot, static_cast<int>(blockIdx.z));
  copy_bytes(entry + change.at, change.memory, change.bytes);
  if (blockIdx.z == 0 && threadIdx.x == 0) {
    KvUndo::archives(entry) = archives && cache.archive_heads[blockIdx.y] >= 0;
  }
}

// One block per draft and kStateFloats of its state.
__global__ void __launch_bounds__(kThreads)
    record_state_kernel(KvView cache, KvUndo undo, const Segment* drafts) {
  let_next_start();
  wait_for_previous();
  const Segment draft = drafts[blockIdx.x];
  copy_state(undo.state(cache, draft.entry), cache.state(draft.sequence), cache.state_floats);
}

// One block per (kv_head, change). Each thread copies the same bytes of every draft, as their
// number and the alignment are the same.
__global__ void __launch_bounds__(kThreads)
    retract_kernel(KvView cache, KvUndo undo, Retracted drafts) {
  let_next_start();
  wait_for_previous();
  const KvHead head = cache.head(drafts.sequence, blockIdx.x);
#pragma unroll
  for (int i = 0; i < kMostDrafts; ++i) {
    if (i == drafts.n) break;
    std::byte* const entry = undo.entry(cache, drafts.entries[i], blockIdx.x);
    const KvChange change =
        KvUndo::change(cache, head, KvUndo::slot(entry), static_cast<int>(blockIdx.y));
    copy_bytes(change.memory, entry + change.at, change.bytes);
  }
}

__global__ void __launch_bounds__(kThreads)
    retract_state_kernel(KvView cache, KvUndo undo, int32_t sequence, int32_t entry) {
  let_next_start();
  wait_for_previous();
  copy_state(cache.state(sequence), undo.state(cache, entry), cache.state_floats);
}

unsigned state_blocks(const KvView& cache) {
  return static_cast<unsigned>((cache.state_floats + kStateFloats - 1) / kStateFloats);
}

}  // namespace

void record_drafts(const Stream& stream, const KvView& cache, const KvUndo& undo,
                   const DeviceBatch& drafts, bool archives) {
  const dim3 grid(drafts.n_segments, cache.n_kv_heads, KvUndo::kChanges);
  launch(stream, record_kernel, grid, dim3(kThreads), 0, cache, undo, drafts.segments, archives);
}

void record_states(const Stream& stream, const KvView& cache, const KvUndo& undo,
                   const DeviceBatch& drafts) {
  launch(stream, record_state_kernel, dim3(drafts.n_segments, state_blocks(cache)), dim3(kThreads),
         0, cache, undo, drafts.segments);
}

void retract(const Stream& stream, const KvView& cache, const KvUndo& undo,
             const Retraction& drafts) {
  Retracted all{drafts.sequence, drafts.length, static_cast<int32_t>(drafts.entries.size()), {}};
  std::ranges::copy(drafts.entries, all.entries);
  if (cache.slots > 0) {
    if (cache.archive != nullptr) remove_archived(stream, cache, undo, all);
    launch(stream, retract_kernel, dim3(cache.n_kv_heads, KvUndo::kChanges), dim3(kThreads), 0,
           cache, undo, all);
  }
  if (cache.states == nullptr) return;
  // The first draft's entry has the state before all of them.
  launch(stream, retract_state_kernel, dim3(1, state_blocks(cache)), dim3(kThreads), 0, cache, undo,
         drafts.sequence, drafts.entries.back());
}

}  // namespace h2o::cuda
