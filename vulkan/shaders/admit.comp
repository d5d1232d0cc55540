// Eviction after a segment of several rows, one workgroup per kv_head: selects the next slot and,
// if the rows did not fit, the tokens to keep and a free slot for each row that is kept.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define THREADS 256
layout(local_size_x = THREADS) in;

#include "kv.glsl"
#include "victim.glsl"
#include "admission.glsl"

layout(push_constant, scalar) uniform Push {
  Step step;
  int segment_index;
};

// Arrays that threads exchange.
layout(buffer_reference, scalar, buffer_reference_align = 8) coherent buffer SharedLongs {
  uint64_t at[];
};
layout(buffer_reference, scalar, buffer_reference_align = 4) coherent buffer SharedInts {
  int at[];
};
layout(buffer_reference, scalar, buffer_reference_align = 4) coherent buffer SharedFloats {
  float at[];
};

const uint64_t kLastOrder = ~0UL;
shared int scan[THREADS];
shared int bins[256];
shared uint64_t chosen;
shared int left;

int thread() { return int(gl_LocalInvocationIndex); }

// A float and an index as one integer: ordered by float, ties by index.
uint64_t order_of(float x, uint index) {
  const uint bits = floatBitsToUint(x) == 0x80000000u ? 0u : floatBitsToUint(x);
  const uint sortable = (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
  return uint64_t(sortable) << 32 | index;
}

// The number of lower threads where `counts` is true; adds that of all threads to `total`.
int number_before(bool counts, inout int total) {
  const int t = thread();
  barrier();
  scan[t] = counts ? 1 : 0;
  barrier();
  for (int apart = 1; apart < THREADS; apart *= 2) {
    const int other = t >= apart ? scan[t - apart] : 0;
    barrier();
    scan[t] += other;
    barrier();
  }
  const int before_this = total + scan[t] - (counts ? 1 : 0);
  total += scan[THREADS - 1];
  return before_this;
}

// The k-th smallest, k from 1, of orders [n]: a radix select, eight bits at a time.
uint64_t select_order(SharedLongs orders, int n, int k) {
  uint64_t prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = thread(); i < 256; i += THREADS) bins[i] = 0;
    barrier();
    for (int i = thread(); i < n; i += THREADS) {
      const uint64_t order = orders.at[i];
      if (shift < 56 && (order >> (shift + 8)) != (prefix >> (shift + 8))) continue;
      atomicAdd(bins[int(order >> shift) & 255], 1);
    }
    barrier();
    if (thread() == 0) {
      int bin = 0;
      for (; k > bins[bin]; ++bin) k -= bins[bin];
      chosen = prefix | uint64_t(bin) << shift;
      left = k;
    }
    barrier();
    prefix = chosen;
    k = left;
    barrier();
  }
  return prefix;
}

// Sorts keys [n] in ascending order: a bitonic sort in which every exchange puts the smaller key
// first, so that infinite keys past the end would stay there, and need not exist.
void sort_tokens(SharedLongs tokens, int n) {
  for (int merged = 2; merged / 2 < n; merged *= 2) {
    for (int apart = merged / 2; apart > 0; apart /= 2) {
      for (int a = thread(); a < n; a += THREADS) {
        const int b = apart == merged / 2 ? a ^ (merged - 1) : a ^ apart;
        if (b <= a || b >= n) continue;
        const uint64_t first = tokens.at[a], second = tokens.at[b];
        if (second < first) {
          tokens.at[a] = second;
          tokens.at[b] = first;
        }
      }
      wait_for_all();
    }
  }
}

// The score of slot i, or of row i - slots.
SharedFloats score_at(Keys keys, int i) {
  return SharedFloats(i < keys.head.slots
                          ? floats(step.scores, keys.head.index + i)
                          : floats(step.staged_scores, keys.staged + i - keys.head.slots));
}

// Replaces the scores of all evictable tokens by the maximum over their evictable neighbors.
void pool_scores(Keys keys, Admission work, int n_written, int vacant, int next) {
  const Head head = keys.head;
  // Evictable tokens by position: those in slots, then rows, which are younger.
  SharedLongs tokens = SharedLongs(work.orders);  // position, then index: a slot, or slots + row
  int n_slots = 0;
  for (int begin = 0; begin < n_written; begin += THREADS) {
    const int slot = begin + thread();
    const bool is = slot < n_written && slot != vacant &&
                    evictable(head.policy, ints(step.positions, head.index).at[slot], next);
    const int i = number_before(is, n_slots);
    if (is) {
      const int position = ints(step.positions, head.index).at[slot];
      tokens.at[i] = uint64_t(position) << 32 | uint64_t(slot);
    }
  }
  wait_for_all();
  sort_tokens(tokens, n_slots);
  int n = n_slots;
  for (int begin = 0; begin < keys.segment.n_rows; begin += THREADS) {
    const int row = begin + thread();
    const bool is = row < keys.segment.n_rows &&
                    evictable(head.policy, keys.segment.position + row, next);
    const int i = number_before(is, n);
    if (is) tokens.at[i] = uint64_t(head.slots + row);
  }
  wait_for_all();
  SharedFloats pooled = SharedFloats(work.pooled);
  for (int i = thread(); i < n; i += THREADS) {
    float largest = 0.0;
    for (int j = max(i - NEIGHBORS, 0); j < min(i + NEIGHBORS + 1, n); ++j) {
      largest = max(largest, score_at(keys, int(tokens.at[j] & 0xffffffffUL)).at[0]);
    }
    pooled.at[i] = largest;
  }
  wait_for_all();
  for (int i = thread(); i < n; i += THREADS) {
    score_at(keys, int(tokens.at[i] & 0xffffffffUL)).at[0] = pooled.at[i];
  }
  wait_for_all();
}

// The eviction order of slot i, or of row i - slots.
uint64_t order_at(Keys keys, int i, int n_written, int vacant, int next) {
  const Head head = keys.head;
  const bool is_row = i >= head.slots;
  const int row = i - head.slots;
  if (!is_row && (i >= n_written || i == vacant)) return kLastOrder;
  const int position =
      is_row ? keys.segment.position + row : ints(step.positions, head.index).at[i];
  if (!evictable(head.policy, position, next)) return kLastOrder;
  const float score = keeps_scores(head.policy) ? score_at(keys, i).at[0] : 0.0;
  float norm = 1.0;
  if (weighs_values(head.policy)) {
    norm = is_row ? floats(step.staged_value_norms, keys.staged).at[row]
                  : floats(step.value_norms, head.index).at[i];
  }
  return order_of(importance(head.policy, score, norm, position, next, head.number),
                  0xffffffffu - uint(position));
}

// Subtracts from each rank the number of lower ranks that are evicted, and ranks the rows.
void close_ranks(Keys keys, Admission work, SharedLongs orders, uint64_t last, int n_written,
                 int vacant, int n_free) {
  SharedInts closed = SharedInts(work.closed), to = SharedInts(work.to);
  Ints ranks = ints(step.ranks, keys.head.index);
  for (int i = thread(); i < n_written; i += THREADS) {
    if (i != vacant) closed.at[ranks.at[i]] = orders.at[i] <= last ? 1 : 0;
  }
  wait_for_all();
  int total = 0;
  for (int begin = 0; begin < keys.kept; begin += THREADS) {
    const int rank = begin + thread();
    const int lower = number_before(rank < keys.kept && closed.at[rank] != 0, total);
    if (rank < keys.kept) closed.at[rank] = lower;
  }
  wait_for_all();
  for (int i = thread(); i < n_written; i += THREADS) {
    if (i != vacant && orders.at[i] > last) ranks.at[i] -= closed.at[ranks.at[i]];
  }
  wait_for_all();
  total = 0;
  for (int begin = 0; begin < keys.segment.n_rows; begin += THREADS) {
    const int row = begin + thread();
    const bool stays = row < keys.segment.n_rows && to.at[row] >= 0;
    const int i = number_before(stays, total);
    if (stays) ranks.at[to.at[row]] = keys.kept - n_free + i;
  }
}

// Keeps `budget` tokens.
void admit_rows(Keys keys) {
  const Head head = keys.head;
  const Segment segment = keys.segment;
  const Admission work = admission_of(step, keys.kv_head);
  const int next = segment.position + segment.n_rows;
  const int n_written = written(head, segment.position);
  const int vacant = vacant_slot(head, segment.position);
  const int n = head.slots + segment.n_rows;
  const int n_evicted = int(int64_t(keys.kept) + segment.n_rows - budget(head.policy));
  if (pools_scores(head.policy, n_evicted)) pool_scores(keys, work, n_written, vacant, next);

  SharedLongs orders = SharedLongs(work.orders);
  for (int i = thread(); i < n; i += THREADS) {
    orders.at[i] = order_at(keys, i, n_written, vacant, next);
  }
  wait_for_all();
  const uint64_t last = select_order(orders, n, n_evicted);

  // Free slots in order: those of evicted tokens, then unused ones.
  SharedInts evicted = SharedInts(work.evicted), to = SharedInts(work.to);
  int n_free = 0;
  for (int begin = 0; begin < n_written; begin += THREADS) {
    const int slot = begin + thread();
    const bool goes = slot < n_written && orders.at[slot] <= last;
    const int i = number_before(goes, n_free);
    if (goes) evicted.at[i] = slot;
  }
  wait_for_all();
  int n_entering = 0;
  for (int begin = 0; begin < segment.n_rows; begin += THREADS) {
    const int row = begin + thread();
    const bool enters = row < segment.n_rows && orders.at[head.slots + row] > last;
    const int i = number_before(enters, n_entering);
    if (row >= segment.n_rows) continue;
    to.at[row] = !enters ? -1 : i < n_free ? evicted.at[i] : keys.first + i - n_free;
  }
  wait_for_all();
  if (segment.rolling) close_ranks(keys, work, orders, last, n_written, vacant, n_free);
  // slots = budget + 1: exactly one is left.
  if (thread() == 0) {
    Ints(head.next_slot).at[0] =
        n_entering < n_free ? evicted.at[n_entering] : keys.first + n_entering - n_free;
  }
}

void main() {
  const Segment segment = segment_at(step, segment_index);
  const Keys keys = keys_of(step, segment, int(gl_WorkGroupID.x));
  wait_for_all();  // which have read next_slot
  if (!keys.fits) {
    admit_rows(keys);
    return;
  }
  const int n_keys = keys.kept + segment.n_rows;
  const bool evicting = evicts(keys.head.policy, keys.head.slots) && n_keys == keys.head.slots;
  Victim victim = Victim(infinity(), -1, -1);
  for (int i = thread(); evicting && i < n_keys; i += THREADS) {
    const float score = keeps_scores(keys.head.policy) ? score_of(step, keys, i).at[0] : 0.0;
    const Victim other = victim_of(step, keys, i, score);
    if (before(other, victim)) victim = other;
  }
  select_next_slot(step, keys, n_keys, evicting, victim);
}
