// For segments of one row: adds the attention that each token received to its score, and selects
// the next slot. A workgroup for each segment and kv_head.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define THREADS 128
layout(local_size_x = THREADS) in;

#include "kv.glsl"
#include "victim.glsl"

layout(push_constant, scalar) uniform Push { Step step; };

void main() {
  const Segment segment = segment_at(step, int(gl_WorkGroupID.x));
  if (segment.n_rows != 1) return;
  const int kv_head = int(gl_WorkGroupID.y);
  const Keys keys = keys_of(step, segment, kv_head);
  const Policy policy = keys.head.policy;
  const int group = step.n_heads / step.n_kv_heads;
  const int n_keys = keys.kept + 1;
  const int64_t query = int64_t(segment.sequence) * step.n_heads + kv_head * group;
  const float decay = step.reads != 0 ? 1.0 : policy.decay;
  const bool evicting =
      step.evicts != 0 && evicts(policy, keys.head.slots) && n_keys == keys.head.slots;
  wait_for_all();  // which have read next_slot
  Victim victim = Victim(infinity(), -1, -1);
  for (int i = int(gl_LocalInvocationIndex); i < n_keys; i += THREADS) {
    float score = 0.0;
    if (keeps_scores(policy)) {
      float received = 0.0;
      for (int h = 0; h < group; ++h) {
        const float logit = floats(step.logits, (query + h) * step.slots).at[i];
        received += logit == -largest_float()  // not seen
                        ? 0.0
                        : exp_negative(logit - floats(step.lse, query + h).at[0]);
      }
      Floats at = score_of(step, keys, i);
      score = with_received(policy, at.at[0] * decay, received);
      at.at[0] = score;
    }
    if (!evicting) continue;
    const Victim other = victim_of(step, keys, i, score);
    if (before(other, victim)) victim = other;
  }
  if (step.evicts != 0) select_next_slot(step, keys, n_keys, evicting, victim);
}
