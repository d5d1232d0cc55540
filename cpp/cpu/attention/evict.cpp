#include "cpu/attention/evict.h"

#include <algorithm>
#include <array>

#include "kv/rows.h"

namespace h2o {
namespace {

// The eviction candidate for the token in `row`, when the next one is at `next`.
Victim victim_of(const KvHead& head, const KvRow& row, int32_t position, int32_t next,
                 int32_t slot) {
  const float score = row.score != nullptr ? *row.score : 0.0f;
  const float norm = row.value_norm != nullptr ? *row.value_norm : 1.0f;
  return {head.policy.importance(score, norm, position, next, head.number), position, slot};
}

// Decrements the ranks of tokens younger than the evicted one in `slot`.
void close_rank(const KvHead& head, int32_t slot, int32_t used) {
  const int32_t rank = head.ranks[slot];
  for (int32_t i = 0; i < used; ++i) head.ranks[i] -= head.ranks[i] > rank;
}

void copy_row(const KvView& cache, const KvRow& from, const KvRow& to) {
  std::copy_n(from.k, cache.k_row_bytes, to.k);
  std::copy_n(from.v, cache.v_row_bytes, to.v);
  if (to.score != nullptr) *to.score = *from.score;
  if (to.value_norm != nullptr) *to.value_norm = *from.value_norm;
}

// Replaces the scores of all evictable tokens by the maximum over their evictable neighbors.
void pool_scores(const KvHead& head, int32_t next, Victim* victims, int64_t n, const auto& row_of) {
  constexpr int64_t kNeighbors = KvPolicy::kNeighbors;
  std::sort(victims, victims + n,
            [](const Victim& a, const Victim& b) { return a.position < b.position; });
  for (int64_t i = 0; i < n; ++i) {
    float largest = 0;
    for (int64_t j = std::max(i - kNeighbors, int64_t{0}); j < std::min(i + kNeighbors + 1, n); ++j)
      largest = std::max(largest, *row_of(victims[j]).score);
    victims[i].importance = largest;
  }
  for (int64_t i = 0; i < n; ++i) {
    const KvRow row = row_of(victims[i]);
    *row.score = victims[i].importance;
    victims[i] = victim_of(head, row, victims[i].position, next, victims[i].slot);
  }
}

// The cached keys of a page of the archive, at most one per position.
class PageKeys {
 public:
  PageKeys(const ArchiveWriter& archive, int32_t page) : archive_(archive), page_(page) {}

  void add(const KvRow& row, int32_t position) {
    if (archive_.page_of(position) == page_) keys_[n_++] = row.k;
  }
  void add_slots(const KvView& cache, const KvHead& head, int32_t written, int32_t vacant) {
    for (int32_t i = 0; i < written; ++i) {
      if (i != vacant) add(slot_row(cache, head, i), head.positions[i]);
    }
  }
  void fit() const { archive_.fit(page_, {keys_.data(), n_}); }

 private:
  const ArchiveWriter& archive_;
  int32_t page_;
  size_t n_ = 0;
  std::array<const std::byte*, kGridPageTokens> keys_;
};

}  // namespace

bool select_next_slot(const CpuKernels& kernels, const KvHead& head, const Segment& segment,
                      float* importances) {
  const int32_t next = segment.position + segment.n_rows;
  const int32_t used = head.policy.kept(segment.position) + segment.n_rows;
  if (!head.evicts() || used < head.slots) {
    *head.next_slot = used;
    return false;
  }
  const float* importance = head.scores;  // the default importance
  if (head.policy.heavy > 0 && !head.policy.plain()) {
    for (int32_t i = 0; i < used; ++i) {
      const float score = head.scores != nullptr ? head.scores[i] : 0.0f;
      const float norm = head.value_norms != nullptr ? head.value_norms[i] : 1.0f;
      importances[i] = head.policy.importance(score, norm, head.positions[i], next, head.number);
    }
    importance = importances;
  }
  const KvPolicy& policy = head.policy;
  const auto victim = static_cast<int32_t>(kernels.lowest(
      importance, head.positions, used,
      {policy.sinks, policy.first_recent(next), policy.tail_begin, policy.tail_end}));
  *head.next_slot = victim;
  if (segment.rolling) close_rank(head, victim, used);
  return true;
}

void archive_next_slot(const KvView& cache, const KvHead& head, const Segment& segment,
                       const ArchiveWriter& archive) {
  const int32_t slot = *head.next_slot;
  const int32_t page = archive.page_of(head.positions[slot]);
  if (archive.needs_fit(page)) {
    PageKeys keys(archive, page);
    keys.add_slots(cache, head, head.policy.kept(segment.position) + segment.n_rows, -1);
    keys.fit();
  }
  archive.add(slot_row(cache, head, slot), head.positions[slot]);
  archive.bound(page);
}

void admit_chunk(const KvView& cache, const KvHead& head, const KvStaging& chunk,
                 const Segment& segment, const ArchiveWriter* archive, Victim* victims) {
  const int32_t next = segment.position + segment.n_rows;
  const int32_t written = head.written(segment.position);
  const int32_t vacant = head.vacant_slot(segment.position);

  // Rows of the chunk are numbered after the slots: slots + row.
  int64_t n = 0;
  for (int32_t i = 0; i < written; ++i) {
    const int32_t position = head.positions[i];
    if (i == vacant || !head.policy.evictable(position, next)) continue;
    victims[n++] = victim_of(head, slot_row(cache, head, i), position, next, i);
  }
  for (int32_t row = 0; row < segment.n_rows; ++row) {
    const int32_t position = segment.position + row;
    if (!head.policy.evictable(position, next)) continue;
    const KvRow from = chunk_row(cache, head, chunk, row);
    victims[n++] = victim_of(head, from, position, next, head.slots + row);
  }
  const int64_t n_evicted =
      head.policy.kept(segment.position) + int64_t{segment.n_rows} - head.policy.budget();
  const auto row_of = [&](const Victim& victim) {
    return victim.slot < head.slots ? slot_row(cache, head, victim.slot)
                                    : chunk_row(cache, head, chunk, victim.slot - head.slots);
  };
  if (head.policy.pools_scores(n_evicted)) pool_scores(head, next, victims, n, row_of);
  std::nth_element(victims, victims + n_evicted, victims + n,
                   [](const Victim& a, const Victim& b) { return a.before(b); });
  std::sort(victims, victims + n_evicted,
            [](const Victim& a, const Victim& b) { return a.slot < b.slot; });
  for (int64_t i = 0; archive != nullptr && i < n_evicted; ++i) {
    const int32_t page = archive->page_of(victims[i].position);
    if (archive->needs_fit(page)) {
      PageKeys keys(*archive, page);
      keys.add_slots(cache, head, written, vacant);
      for (int32_t row = 0; row < segment.n_rows; ++row) {
        keys.add(chunk_row(cache, head, chunk, row), segment.position + row);
      }
      keys.fit();
    }
    archive->add(row_of(victims[i]), victims[i].position);
    const bool is_last = i + 1 == n_evicted || archive->page_of(victims[i + 1].position) != page;
    if (is_last) archive->bound(page);
  }

  // Free slots in order: those of evicted tokens, then unused ones.
  const Victim* evicted = victims;
  const Victim* const evicted_end = victims + n_evicted;
  int32_t unused = *head.next_slot;
  const auto take_free_slot = [&] {
    if (evicted != evicted_end && evicted->slot < head.slots) return (evicted++)->slot;
    return unused++;
  };
  const Victim* evicted_row = std::partition_point(
      evicted, evicted_end, [&](const Victim& v) { return v.slot < head.slots; });
  for (int32_t row = 0; row < segment.n_rows; ++row) {
    if (evicted_row != evicted_end && evicted_row->slot == head.slots + row) {
      ++evicted_row;
      continue;
    }
    const int32_t to = take_free_slot();
    copy_row(cache, chunk_row(cache, head, chunk, row), slot_row(cache, head, to));
    head.positions[to] = segment.position + row;
  }
  *head.next_slot = take_free_slot();  // slots = budget + 1: exactly one is left
  if (segment.rolling) {
    rank_slots(head, head.slots, *head.next_slot, reinterpret_cast<int32_t*>(victims));
  }
}

void rank_slots(const KvHead& head, int32_t written, int32_t vacant, int32_t* order) {
  int32_t n = 0;
  for (int32_t i = 0; i < written; ++i) {
    if (i != vacant) order[n++] = i;
  }
  std::sort(order, order + n,
            [&](int32_t a, int32_t b) { return head.positions[a] < head.positions[b]; });
  for (int32_t rank = 0; rank < n; ++rank) head.ranks[order[rank]] = rank;
}

}  // namespace h2o
