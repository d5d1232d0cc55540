// One attention operation on a layer of the cache: its arguments, and where keys are.
#include "policy.glsl"

// Mirrors Step in attention/step.h. Device addresses of arrays; see KvView, Attention and Workspace.
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Step {
  uint64_t k, v, positions, scores, value_norms, ranks, next_slot, policies, output_gram;
  uint64_t staged_k, staged_v, staged_scores, staged_value_norms, rope_table;
  uint64_t q, new_k, new_v, result, frequencies, sinks, slopes, segments, segment_of;
  uint64_t lse, logits, partial_out, partial_shift, partial_total, admission;
  int64_t k_row_bytes, v_row_bytes;
  int n_heads, n_kv_heads, head_dim, slots, max_rows, first_head;
  int n_half, pairs, window, reads, evicts;
  float scale, softcap, magnitude;
};
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer Policies {
  Policy at[];
};

struct Segment {
  int sequence, position, row, n_rows;
  bool rolling;
};
Segment segment_at(Step step, int i) {
  Ints s = Ints(step.segments + uint64_t(i * kSegmentBytes));
  return Segment(s.at[0], s.at[1], s.at[2], s.at[3], (s.at[4] & 255) != 0);
}

// Mirrors KvHead: the slots of one sequence and kv_head.
struct Head {
  Policy policy;
  int slots;      // used by the policy
  int64_t index;  // of the first slot, in all arrays
  uint64_t next_slot;
  int number;
};
Head head_of(Step step, int sequence, int kv_head) {
  const Policy policy = Policies(step.policies).at[sequence];
  const int64_t i = int64_t(sequence) * step.n_kv_heads + kv_head;
  return Head(policy, slots_of(policy, step.slots), i * step.slots, step.next_slot + 4 * i,
              step.first_head + kv_head);
}
int written(Head head, int n) { return n < head.slots ? n : head.slots; }
int vacant_slot(Head head, int n) { return n < head.slots ? -1 : Ints(head.next_slot).at[0]; }

// The keys that the rows of a segment attend to, in order: the cached tokens, then the segment's
// own rows, of which row r sees the first kept + r + 1 keys. The rows are in free slots if all fit,
// and otherwise staged until every row has attended.
struct Keys {
  Head head;
  Segment segment;
  int kv_head;
  int kept;     // cached tokens before the segment
  int first;    // slot of the first new row, if the rows fit; otherwise the first free slot
  bool fits;
  int64_t staged;  // index of the first staged row
};
Keys keys_of(Step step, Segment segment, int kv_head) {
  Keys keys;
  keys.head = head_of(step, segment.sequence, kv_head);
  keys.segment = segment;
  keys.kv_head = kv_head;
  keys.kept = kept_of(keys.head.policy, segment.position);
  keys.first = Ints(keys.head.next_slot).at[0];
  keys.fits = int64_t(keys.kept) + segment.n_rows <= keys.head.slots;
  keys.staged = int64_t(kv_head) * step.max_rows + segment.row;
  return keys;
}

// The slot of key i, or -1 if it is staged as row i - kept.
int slot_of(Keys keys, int i) {
  if (i >= keys.kept) return keys.fits ? keys.first + i - keys.kept : -1;
  return i < keys.first ? i : i + 1;  // a filled pool has one free row, at `first`
}
uint64_t key_row(Step step, Keys keys, int i) {
  const int slot = slot_of(keys, i);
  return slot >= 0 ? step.k + (keys.head.index + slot) * step.k_row_bytes
                   : step.staged_k + (keys.staged + i - keys.kept) * step.k_row_bytes;
}
uint64_t value_row(Step step, Keys keys, int i) {
  const int slot = slot_of(keys, i);
  return slot >= 0 ? step.v + (keys.head.index + slot) * step.v_row_bytes
                   : step.staged_v + (keys.staged + i - keys.kept) * step.v_row_bytes;
}
Floats score_of(Step step, Keys keys, int i) {
  const int slot = slot_of(keys, i);
  return slot >= 0 ? floats(step.scores, keys.head.index + slot)
                   : floats(step.staged_scores, keys.staged + i - keys.kept);
}
int position_of(Step step, Keys keys, int i) {
  return i >= keys.kept ? keys.segment.position + i - keys.kept
                        : ints(step.positions, keys.head.index + slot_of(keys, i)).at[0];
}
// The rank, in the RoPE table, of a rolling segment's key.
int rank_of(Step step, Keys keys, int i) {
  return i >= keys.kept ? i : ints(step.ranks, keys.head.index + slot_of(keys, i)).at[0];
}
// The distance from a row of the segment to key i; in ranks if positions roll.
int distance_to(Step step, Keys keys, int row, int i) {
  return keys.segment.rolling ? keys.kept + row - rank_of(step, keys, i)
                              : keys.segment.position + row - position_of(step, keys, i);
}
