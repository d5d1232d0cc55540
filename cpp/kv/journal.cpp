#include "kv/journal.h"

#include "backend/backend.h"
#include "core/layout.h"

namespace h2o {
namespace {

int64_t entry_bytes(const KvView& layer) {
  const KvChange values = KvUndo::change(layer, KvHead{}, 0, KvUndo::kChanges - 1);
  return (values.at + layer.v_row_bytes + 15) / 16 * 16;
}

}  // namespace

KvJournal::KvJournal(Backend& backend, std::span<const KvView> layers, int32_t max_rows)
    : max_rows_(max_rows) {
  Layout layout;
  for (const KvView& layer : layers) {
    const int64_t bytes = entry_bytes(layer);
    const int64_t n_entries = layer.slots > 0 ? int64_t{layer.n_kv_heads} * max_rows : 0;
    const int64_t entries = layout.place(bytes * n_entries);
    const int64_t states = layer.state_floats * int64_t{sizeof(float)};
    layers_.push_back({entries, bytes, layout.place(states * max_rows)});
  }
  storage_ = backend.allocate(layout.size());
}

}  // namespace h2o
