#include "cpu/attention/drafts.h"

#include <cstring>

#include "cpu/attention/archive.h"
#include "cpu/attention/workspace.h"

namespace h2o {
namespace {

// Cost of copying a number, in multiply-adds.
constexpr int64_t kCopyCost = 4;

void restore_head(const CpuKernels& kernels, const KvView& layer, const KvUndo& undo,
                  const Retraction& drafts, int32_t kv_head, float* scratch) {
  const KvHead head = layer.head(drafts.sequence, kv_head);
  int32_t length = drafts.length;
  for (const int32_t i : drafts.entries) {
    std::byte* const entry = undo.entry(layer, i, kv_head);
    --length;  // without this draft
    if (KvUndo::archived(entry, head, length)) {
      ArchiveWriter(kernels, layer, drafts.sequence, kv_head, scratch)
          .remove_last(head.positions[*head.next_slot]);
    }
    const int32_t slot = KvUndo::slot(entry);
    for (int c = 0; c < KvUndo::kChanges; ++c) {
      const KvChange change = KvUndo::change(layer, head, slot, c);
      if (change.bytes > 0) std::memcpy(change.memory, entry + change.at, change.bytes);
    }
  }
}

}  // namespace

void record_draft(const KvView& layer, const KvUndo& undo, const Segment& draft, int32_t kv_head,
                  bool archives) {
  const KvHead head = layer.head(draft.sequence, kv_head);
  std::byte* const entry = undo.entry(layer, draft.entry, kv_head);
  for (int c = 0; c < KvUndo::kChanges; ++c) {
    const KvChange change = KvUndo::change(layer, head, *head.next_slot, c);
    if (change.bytes > 0) std::memcpy(entry + change.at, change.memory, change.bytes);
  }
  KvUndo::archives(entry) = archives;
}

void record_state(const KvView& layer, const KvUndo& undo, const Segment& draft) {
  std::memcpy(undo.state(layer, draft.entry), layer.state(draft.sequence),
              layer.state_floats * sizeof(float));
}

void retract(const CpuKernels& kernels, ThreadPool& pool, std::span<const KvView> layers,
             const KvJournal& journal, const Retraction& drafts) {
  int64_t state_floats = 0;
  for (const KvView& layer : layers) {
    const KvUndo undo = journal.layer(layer.layer);
    if (layer.slots > 0) {
      const Workspace work(kernels, layer, pool.size());
      const int64_t cost = kCopyCost * undo.entry_bytes / int64_t{sizeof(float)} *
                           layer.n_kv_heads * std::ssize(drafts.entries);
      pool.parallel_for(layer.n_kv_heads, cost, [&](int thread, int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; ++h) {
          restore_head(kernels, layer, undo, drafts, static_cast<int32_t>(h), work.q(thread));
        }
      });
    }
    if (layer.states != nullptr) state_floats += layer.state_floats;
  }
  pool.parallel_for(std::ssize(layers), kCopyCost * state_floats,
                    [&](int, int64_t begin, int64_t end) {
                      for (const KvView& layer : layers.subspan(begin, end - begin)) {
                        if (layer.states == nullptr) continue;
                        // The first draft's entry has the state before all of them.
                        std::memcpy(layer.state(drafts.sequence),
                                    journal.layer(layer.layer).state(layer, drafts.entries.back()),
                                    layer.state_floats * sizeof(float));
                      }
                    });
}

}  // namespace h2o
