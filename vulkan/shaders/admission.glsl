// The workspace of admit.comp for one kv_head, as admission_bytes() in attention/step.cpp. "All" are
// the slots followed by the rows of the segment.
struct Admission {
  uint64_t orders;   // [all] int64: eviction order; kLastOrder for tokens that must be kept
  uint64_t pooled;   // [all] f32: pooled scores, before the others are written
  uint64_t to;       // [rows] int32: the slot of a row that is kept, or -1
  uint64_t evicted;  // [rows] int32: slots of evicted tokens, in order
  uint64_t closed;   // [slots] int32, by rank: how many tokens of lower rank are evicted
};
Admission admission_of(Step step, int kv_head) {
  const uint64_t slots = (step.slots + 1) / 2 * 2, rows = (step.max_rows + 1) / 2 * 2;
  Admission work;
  work.orders = step.admission + kv_head * ((slots + rows) * 8 + (2 * rows + slots) * 4);
  work.to = work.pooled = work.orders + (slots + rows) * 8;
  work.evicted = work.to + rows * 4;
  work.closed = work.evicted + rows * 4;
  return work;
}
