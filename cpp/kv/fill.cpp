#include "kv/fill.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "kv/rows.h"

namespace h2o {
namespace {

// Fills one kv_head from another that has `length` tokens, in order. `victims`: [length] scratch.
void fill_head(const KvView& cache, const KvHead& head, const KvView& full, const KvHead& from,
               int32_t length, std::vector<Victim>& victims) {
  const KvPolicy& policy = head.policy;
  victims.clear();
  for (int32_t i = 0; i < length; ++i) {
    const int32_t position = from.positions[i];
    if (!policy.evictable(position, length)) continue;
    victims.push_back(
        {policy.importance(from.scores[i], 1, position, length, head.number), position, i});
  }
  const auto evicted = victims.begin() + (length - policy.kept(length));
  std::nth_element(victims.begin(), evicted, victims.end(),
                   [](const Victim& a, const Victim& b) { return a.before(b); });
  std::sort(victims.begin(), evicted,
            [](const Victim& a, const Victim& b) { return a.slot < b.slot; });
  auto next_evicted = victims.begin();
  int32_t to = 0;
  for (int32_t i = 0; i < length; ++i) {
    if (next_evicted != evicted && next_evicted->slot == i) {
      ++next_evicted;
      continue;
    }
    const KvRow source = slot_row(full, from, i);
    const KvRow row = slot_row(cache, head, to);
    std::copy_n(source.k, cache.k_row_bytes, row.k);
    std::copy_n(source.v, cache.v_row_bytes, row.v);
    if (row.score != nullptr) *row.score = *source.score;
    head.positions[to++] = from.positions[i];
  }
  *head.next_slot = to;
}

}  // namespace

void fill_sequence(KvCache& cache, int32_t sequence, const KvCache& full) {
  const int32_t length = full.length(0);
  const KvShape& shape = cache.shape();
  require(cache.archive() == nullptr && !shape.may_roll() && shape.state_floats.empty(),
          "a cache with an archive, rolling positions or recurrent states cannot be filled");
  for (int32_t l = 0; l < shape.n_layers; ++l) {
    const KvPolicy& policy = cache.policy(l, sequence);
    const KvView &to = cache.layer(l), &from = full.layer(l);
    require(!policy.weighs_values(), "a policy that weighs values cannot be filled");
    require(to.n_kv_heads == from.n_kv_heads && to.k_row_bytes == from.k_row_bytes &&
                to.v_row_bytes == from.v_row_bytes && from.scores != nullptr,
            "layer ", l, " differs from that of the full cache");
    require(policy.kept(length) <= to.slots, length, " tokens for ", to.slots, " slots");
  }
  std::vector<std::vector<Victim>> victims(shape.n_layers);  // each layer has its own thread
  for (std::vector<Victim>& each : victims) each.reserve(length);
  cache.backend().parallel_for(shape.n_layers, [&](int64_t l) {
    const KvView &to = cache.layer(static_cast<int32_t>(l)),
                 &from = full.layer(static_cast<int32_t>(l));
    for (int32_t h = 0; h < to.n_kv_heads; ++h) {
      fill_head(to, to.head(sequence, h), from, from.head(0, h), length, victims[l]);
    }
  });
  cache.set_length(sequence, length);
}

}  // namespace h2o
