// Moves a kept row of one kv_head from the staging area to its slot.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 64) in;

#include "kv.glsl"
#include "admission.glsl"

layout(push_constant, scalar) uniform Push {
  Step step;
  int segment_index;
};

// Rows have whole pairs of bytes.
void copy_bytes(uint64_t to, uint64_t from, int64_t n) {
  for (int i = int(gl_LocalInvocationIndex); i < n / 2; i += 64) {
    Shorts(to).at[i] = Shorts(from).at[i];
  }
}

void main() {
  const int row = int(gl_WorkGroupID.x), kv_head = int(gl_WorkGroupID.y);
  const Segment segment = segment_at(step, segment_index);
  const Head head = head_of(step, segment.sequence, kv_head);
  if (int64_t(kept_of(head.policy, segment.position)) + segment.n_rows <= head.slots) return;
  const int slot = Ints(admission_of(step, kv_head).to).at[row];
  if (slot < 0) return;
  const int64_t to = head.index + slot;
  const int64_t from = int64_t(kv_head) * step.max_rows + segment.row + row;
  copy_bytes(step.k + to * step.k_row_bytes, step.staged_k + from * step.k_row_bytes,
             step.k_row_bytes);
  copy_bytes(step.v + to * step.v_row_bytes, step.staged_v + from * step.v_row_bytes,
             step.v_row_bytes);
  if (gl_LocalInvocationIndex > 0) return;
  if (keeps_scores(head.policy)) {
    floats(step.scores, to).at[0] = floats(step.staged_scores, from).at[0];
  }
  if (weighs_values(head.policy)) {
    floats(step.value_norms, to).at[0] = floats(step.staged_value_norms, from).at[0];
  }
  ints(step.positions, to).at[0] = segment.position + row;
}
