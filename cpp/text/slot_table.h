// SlotTable: which generation has which of a session's sequences.
//
// A generation occupies a sequence while it is computed. Released, the sequence keeps its content,
// which can be saved or continued until another generation takes it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/session.h"

namespace h2o {

class Generation;

class SlotTable {
 public:
  // `session` must outlive it.
  explicit SlotTable(Session& session);

  // The maximum number of generations with a sequence: fewer than the session's if memory ran out.
  int32_t max_sequences() const { return max_sequences_; }

  // The number of occupied sequences.
  int32_t n_active() const;

  // -1, no sequence, is not occupied.
  bool is_active(int32_t sequence) const { return sequence >= 0 && slots_[sequence].is_active; }

  // Is the content of the sequence (-1: none) this generation's?
  bool holds(int32_t sequence, const Generation& generation) const;

  // A sequence that is not occupied: one that nothing can continue, else the least recently used,
  // else a new one; -1 if all are occupied. Its content does not change.
  int32_t take();

  // Empties a sequence that is not occupied, for `policies` or, if there are none, the session's.
  void reset(int32_t sequence, std::span<const KvPolicy> policies);

  // Do its policies differ from the session's?
  bool has_own_policies(int32_t sequence) const { return slots_[sequence].has_own_policies; }

  // Makes the content the generation's.
  void occupy(int32_t sequence, const std::shared_ptr<Generation>& generation);

  // Ends its use. The content stays the generation's.
  void release(int32_t sequence);

  // Ends its use. The content is nobody's, and the sequence the first to be taken.
  void vacate(int32_t sequence);

 private:
  struct Slot {
    std::weak_ptr<Generation> owner;  // whose content it has
    bool is_active = false;
    bool has_own_policies = false;
    uint64_t used_at = 0;
  };

  bool grow();

  Session& session_;
  int32_t max_sequences_;
  std::vector<Slot> slots_;
  uint64_t clock_ = 0;
};

}  // namespace h2o
