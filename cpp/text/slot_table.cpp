#include "text/slot_table.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace h2o {

SlotTable::SlotTable(Session& session)
    : session_(session),
      max_sequences_(session.options().max_sequences),
      slots_(session.options().n_sequences) {}

int32_t SlotTable::n_active() const {
  return static_cast<int32_t>(std::ranges::count_if(slots_, &Slot::is_active));
}

bool SlotTable::holds(int32_t sequence, const Generation& generation) const {
  return sequence >= 0 && slots_[sequence].owner.lock().get() == &generation;
}

int32_t SlotTable::take() {
  int32_t best = -1;
  const auto key = [this](int32_t i) {
    return std::pair(!slots_[i].owner.expired(), slots_[i].used_at);
  };
  for (int32_t i = 0; i < std::ssize(slots_); ++i) {
    if (!slots_[i].is_active && (best < 0 || key(i) < key(best))) best = i;
  }
  if (best >= 0) return best;
  const auto n = static_cast<int32_t>(slots_.size());
  return grow() ? n : -1;
}

// Doubles the number of sequences, up to the maximum, which becomes the present number if memory
// runs out.
bool SlotTable::grow() {
  const auto n = static_cast<int32_t>(slots_.size());
  if (n >= max_sequences_) return false;
  try {
    session_.reserve_sequences(std::min(2 * n, max_sequences_));
  } catch (const std::bad_alloc&) {
    max_sequences_ = n;
    return false;
  } catch (const FileError&) {  // the archive cannot grow
    max_sequences_ = n;
    return false;
  }
  slots_.resize(std::min(2 * n, max_sequences_));
  return true;
}

void SlotTable::reset(int32_t sequence, std::span<const KvPolicy> policies) {
  Slot& slot = slots_[sequence];
  slot.has_own_policies = true;  // until this succeeds
  session_.reset(sequence, policies.empty() ? session_.options().policies : policies);
  slot.owner.reset();
  slot.has_own_policies = !policies.empty();
}

void SlotTable::occupy(int32_t sequence, const std::shared_ptr<Generation>& generation) {
  slots_[sequence].owner = generation;
  slots_[sequence].is_active = true;
}

void SlotTable::release(int32_t sequence) {
  slots_[sequence].is_active = false;
  slots_[sequence].used_at = ++clock_;
}

void SlotTable::vacate(int32_t sequence) {
  slots_[sequence].owner.reset();
  slots_[sequence].is_active = false;
  slots_[sequence].used_at = 0;
}

}  // namespace h2o
