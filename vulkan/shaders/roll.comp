// Switches a sequence to rolling positions: un-rotates the key of one slot and kv_head, and
// computes its rank, the number of older tokens.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define THREADS 64
#define MOST_DIMS 1024
layout(local_size_x = THREADS) in;
layout(constant_id = 0) const int K_TYPE = 0;

#include "kv.glsl"
#include "kv_types.glsl"
#include "reduce.glsl"
#include "rope.glsl"

layout(push_constant, scalar) uniform Push {
  Step step;
  int sequence, n_tokens;
};

shared float key[MOST_DIMS];

void main() {
  const int t = int(gl_LocalInvocationIndex), n = step.head_dim;
  const Head head = head_of(step, sequence, int(gl_WorkGroupID.y));
  const int n_written = written(head, n_tokens), vacant = vacant_slot(head, n_tokens);
  Ints positions = ints(step.positions, head.index);
  for (int slot = int(gl_WorkGroupID.x); slot < n_written; slot += int(gl_NumWorkGroups.x)) {
    if (slot == vacant) continue;
    const int position = positions.at[slot];
    const uint64_t row = step.k + (head.index + slot) * step.k_row_bytes;
    barrier();
    for (int i = t; i < n; i += THREADS) key[i] = element(K_TYPE, row, i, n);
    barrier();
    for (int i = t; i < step.n_half; i += THREADS) {
      const vec2 angle = rope_angle(step.frequencies, step.magnitude, -position, i);
      const int first = step.pairs != 0 ? 2 * i : i, apart = step.pairs != 0 ? 1 : step.n_half;
      const vec2 pair = turned(angle, key[first], key[first + apart]);
      key[first] = pair.x;
      key[first + apart] = pair.y;
    }
    barrier();
    for (int i = t; i < n; i += THREADS) key[i] = clamped_to(most_stored(K_TYPE), key[i]);
    barrier();
    for (int i = 32 * t; i < n; i += 32 * THREADS) {
      WRITE_BLOCK(key, K_TYPE, row, i, n)
    }
    float older = 0.0;  // counts up to 2^24 are exact in f32
    for (int i = t; i < n_written; i += THREADS) {
      older += i != vacant && positions.at[i] < position ? 1.0 : 0.0;
    }
    older = group_sum(older);
    if (t == 0) ints(step.ranks, head.index).at[slot] = int(older);
  }
}
