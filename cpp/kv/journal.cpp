#include "kv/journal.h"

#include <cstring>

#include "backend/backend.h"
#include "core/layout.h"
#include "kv/rows.h"

namespace h2o {
namespace {

// Calls visit(memory, bytes) for everything that a token stored in `slot` changes.
template <class Visit>
void visit_changes(const KvView& layer, const KvHead& head, int32_t slot, const Visit& visit) {
  const KvRow row = slot_row(layer, head, slot);
  visit(row.k, layer.k_row_bytes);
  visit(row.v, layer.v_row_bytes);
  visit(head.positions + slot, sizeof(int32_t));
  if (head.value_norms != nullptr) visit(head.value_norms + slot, sizeof(float));
  if (head.scores != nullptr) visit(head.scores, head.slots * sizeof(float));
  if (head.ranks != nullptr) visit(head.ranks, head.slots * sizeof(int32_t));
}

int64_t entry_bytes(const KvView& layer) {
  return layer.k_row_bytes + layer.v_row_bytes + 2 * int64_t{sizeof(int32_t)} +
         (layer.value_norms != nullptr ? int64_t{sizeof(float)} : 0) +
         (layer.scores != nullptr ? layer.slots * int64_t{sizeof(float)} : 0) +
         (layer.ranks != nullptr ? layer.slots * int64_t{sizeof(int32_t)} : 0);
}

int64_t state_bytes(const KvView& layer) { return layer.state_floats * int64_t{sizeof(float)}; }

}  // namespace

KvJournal::KvJournal(Backend& backend, std::span<const KvView> layers, int32_t max_rows)
    : max_rows_(max_rows) {
  Layout layout;
  for (const KvView& layer : layers) {
    const int64_t bytes = entry_bytes(layer);
    const int64_t n_entries = layer.slots > 0 ? int64_t{layer.n_kv_heads} * max_rows : 0;
    const int64_t entries = layout.place(bytes * n_entries);
    layers_.push_back({entries, bytes, layout.place(state_bytes(layer) * max_rows)});
  }
  storage_ = backend.allocate(layout.size());
}

std::byte* KvJournal::entry(const KvView& layer, const Segment& draft, int32_t kv_head) const {
  const Layer& at = layers_[layer.layer];
  const int64_t i = int64_t{draft.row - first_row_} * layer.n_kv_heads + kv_head;
  return storage_.data() + at.offset + i * at.entry_bytes;
}

std::byte* KvJournal::state(const KvView& layer, const Segment& draft) const {
  const int64_t i = draft.row - first_row_;
  return storage_.data() + layers_[layer.layer].states + i * state_bytes(layer);
}

void KvJournal::record_state(const KvView& layer, const Segment& draft) const {
  std::memcpy(state(layer, draft), layer.state(draft.sequence), state_bytes(layer));
}

void KvJournal::restore(const KvView& layer, const Segment& draft) const {
  for (int32_t h = 0; layer.slots > 0 && h < layer.n_kv_heads; ++h) restore(layer, draft, h);
  if (layer.states == nullptr) return;
  std::memcpy(layer.state(draft.sequence), state(layer, draft), state_bytes(layer));
}

void KvJournal::record(const KvView& layer, const Segment& draft, int32_t kv_head) const {
  const KvHead head = layer.head(draft.sequence, kv_head);
  std::byte* to = entry(layer, draft, kv_head);
  const auto write = [&to](const void* from, int64_t n_bytes) {
    std::memcpy(to, from, n_bytes);
    to += n_bytes;
  };
  write(head.next_slot, sizeof(int32_t));
  visit_changes(layer, head, *head.next_slot, write);
}

void KvJournal::restore(const KvView& layer, const Segment& draft, int32_t kv_head) const {
  const KvHead head = layer.head(draft.sequence, kv_head);
  const std::byte* from = entry(layer, draft, kv_head);
  const auto read = [&from](void* to, int64_t n_bytes) {
    std::memcpy(to, from, n_bytes);
    from += n_bytes;
  };
  read(head.next_slot, sizeof(int32_t));
  visit_changes(layer, head, *head.next_slot, read);
}

}  // namespace h2o
