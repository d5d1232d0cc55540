#include "join.glsl"

// An evictable token. The lowest importance is evicted first; ties: the younger token, so that all
// back ends agree.
struct Victim {
  float importance;
  int position, slot;
};
bool before(Victim a, Victim b) {
  return a.importance < b.importance || (a.importance == b.importance && a.position > b.position);
}

shared Victim victims[THREADS];

// Orders what threads write to memory before it and read after it, or the other way around.
void wait_for_all() {
  memoryBarrierBuffer();
  barrier();
}

Victim first_of(Victim a, Victim b) {
  if (before(b, a)) return b;
  return a;
}

// The first of all threads' victims.
Victim first_victim(Victim own) {
  JOIN_ALL(victims, own, first_of)
  return victims[0];
}

// Selects the slot of the next token, after the segment's rows: a free one, or that of the evicted
// token, and closes the gap in the ranks. `own`: this thread's victim.
void select_next_slot(Step step, Keys keys, int n_keys, bool evicts, Victim own) {
  const Head head = keys.head;
  if (!evicts) {
    if (gl_LocalInvocationIndex == 0) Ints(head.next_slot).at[0] = n_keys;
    return;
  }
  const Victim victim = first_victim(own);
  if (gl_LocalInvocationIndex == 0) Ints(head.next_slot).at[0] = victim.slot;
  if (!keys.segment.rolling) return;
  const int rank = ints(step.ranks, head.index + victim.slot).at[0];
  wait_for_all();
  for (int slot = int(gl_LocalInvocationIndex); slot < n_keys; slot += THREADS) {
    Ints at = ints(step.ranks, head.index + slot);
    if (at.at[0] > rank) --at.at[0];
  }
}

// The token of key i, which is in a slot.
Victim victim_of(Step step, Keys keys, int i, float score) {
  const int slot = slot_of(keys, i), next = keys.segment.position + keys.segment.n_rows;
  const int position = ints(step.positions, keys.head.index + slot).at[0];
  const Policy policy = keys.head.policy;
  if (!evictable(policy, position, next)) return Victim(infinity(), -1, -1);
  const float norm =
      weighs_values(policy) ? floats(step.value_norms, keys.head.index + slot).at[0] : 1.0;
  return Victim(importance(policy, score, norm, position, next, keys.head.number), position, slot);
}
