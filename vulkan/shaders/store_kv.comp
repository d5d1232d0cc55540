// Rotates a row's q and k of one kv_head, and stores the key and the value in a free slot or, if
// the segment's rows do not fit, in the staging area.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define THREADS 64
#define MOST_DIMS 1024
layout(local_size_x = THREADS) in;
layout(constant_id = 0) const int K_TYPE = 0;
layout(constant_id = 1) const int V_TYPE = 0;

#include "kv.glsl"
#include "kv_types.glsl"
#include "reduce.glsl"
#include "rope.glsl"

layout(push_constant, scalar) uniform Push { Step step; };

shared float k_row[MOST_DIMS], v_row[MOST_DIMS];

// The norm of the value, which is finite, so that importances can be ordered.
float value_norm(int kind, int kv_head) {
  const int n = step.head_dim;
  Floats gram = floats(step.output_gram, int64_t(kv_head) * n * n);  // symmetric
  float norm = 0.0;
  for (int i = int(gl_LocalInvocationIndex); i < n; i += THREADS) {
    float moved = 0.0;
    if (kind == OUTPUT_NORM) {
      for (int j = 0; j < n; ++j) moved = fma(gram.at[j * n + i], v_row[j], moved);
    }
    norm += kind == OUTPUT_NORM ? moved * v_row[i] : abs(v_row[i]);
  }
  norm = group_sum(norm);
  if (is_nan(norm)) return largest_float();
  if (kind == OUTPUT_NORM) norm = sqrt(max(norm, 0.0));  // rounding may make it negative
  return min(norm, largest_float());
}

void main() {
  const int t = int(gl_LocalInvocationIndex), n = step.head_dim;
  const int row = int(gl_WorkGroupID.x), kv_head = int(gl_WorkGroupID.y);
  const Segment segment = segment_at(step, Ints(step.segment_of).at[row]);
  const Keys keys = keys_of(step, segment, kv_head);
  const int own = row - segment.row;
  const int key = keys.kept + own;
  const int position = segment.rolling ? key : segment.position + own;
  const bool stores = step.new_k != 0;
  const int64_t at = (int64_t(row) * step.n_kv_heads + kv_head) * n;
  if (stores) {
    for (int i = t; i < n; i += THREADS) {
      k_row[i] = floats(step.new_k, at).at[i];
      v_row[i] = floats(step.new_v, at).at[i];
    }
    barrier();
  }
  const int group = step.n_heads / step.n_kv_heads;
  Floats q = floats(step.q, at * group);
  for (int i = t; i < step.n_half; i += THREADS) {
    const vec2 angle = rope_angle(step.frequencies, step.magnitude, position, i);
    const int first = step.pairs != 0 ? 2 * i : i, apart = step.pairs != 0 ? 1 : step.n_half;
    for (int h = 0; h < group; ++h) {
      const int a = h * n + first;
      const vec2 pair = turned(angle, q.at[a], q.at[a + apart]);
      q.at[a] = pair.x;
      q.at[a + apart] = pair.y;
    }
    if (!stores || segment.rolling) continue;
    const vec2 pair = turned(angle, k_row[first], k_row[first + apart]);
    k_row[first] = pair.x;
    k_row[first + apart] = pair.y;
  }
  if (!stores) return;
  barrier();
  for (int i = t; i < n; i += THREADS) {
    k_row[i] = clamped_to(most_stored(K_TYPE), k_row[i]);
    v_row[i] = clamped_to(most_stored(V_TYPE), v_row[i]);
  }
  barrier();
  const uint64_t to_k = key_row(step, keys, key), to_v = value_row(step, keys, key);
  for (int i = 32 * t; i < n; i += 32 * THREADS) {
    WRITE_BLOCK(k_row, K_TYPE, to_k, i, n)
  }
  for (int i = 32 * t; i < n && to_v != to_k; i += 32 * THREADS) {  // the same: latent vectors
    WRITE_BLOCK(v_row, V_TYPE, to_v, i, n)
  }
  const Policy policy = keys.head.policy;
  const float norm = weighs_values(policy) ? value_norm(policy.value_norm, kv_head) : 0.0;
  if (t > 0) return;
  const int slot = slot_of(keys, key);
  if (weighs_values(policy)) {
    const int64_t i = slot >= 0 ? keys.head.index + slot : keys.staged + own;
    floats(slot >= 0 ? step.value_norms : step.staged_value_norms, i).at[0] = norm;
  }
  if (keeps_scores(policy)) score_of(step, keys, key).at[0] = 0.0;
  if (slot < 0) return;
  ints(step.positions, keys.head.index + slot).at[0] = segment.position + own;
  if (segment.rolling) ints(step.ranks, keys.head.index + slot).at[0] = key;
}
