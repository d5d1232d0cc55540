// Adds the attention that a tile of keys receives from all rows of a segment to their scores.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "kv.glsl"
#include "kv_types.glsl"
#include "tiles.glsl"

layout(push_constant, scalar) uniform Push {
  Step step;
  int segment_index;
};

// The decay of the attention of `row` until the end of the segment.
float decay_since(Policy policy, int n_rows, int row) {
  return policy.decay == 1.0 ? 1.0 : power(policy.decay, n_rows - 1 - row);
}

void main() {
  const int first_key = int(gl_WorkGroupID.x) * KEYS, kv_head = int(gl_WorkGroupID.y);
  const Segment segment = segment_at(step, segment_index);
  const Keys keys = keys_of(step, segment, kv_head);
  const Policy policy = keys.head.policy;
  const int n_keys = keys.kept + segment.n_rows;
  if (!keeps_scores(policy) || first_key >= n_keys) return;
  const int group = step.n_heads / step.n_kv_heads;
  const int n_queries = segment.n_rows * group;
  const int first_counted = first_scored(policy, segment.n_rows);
  const bool questions = policy.scoring == QUESTION;

  // In the first KEYS threads: from the current row, and the sum over rows, or the largest.
  float of_row = 0.0, received = 0.0;
  int first_query = max(first_key - keys.kept, first_counted) * group;
  for (; first_query < n_queries; first_query += QUERIES) {
    float logits[OWN];
    multiply_tile(step, keys, first_query, n_queries, group, first_key, n_keys, logits);
    const int t = first_query + own_query();
    for (int j = 0; j < OWN; ++j) {
      const int key = first_key + own_lane() + j * LANES;
      float p = 0.0;
      if (t < n_queries && key < n_keys && sees(step, keys, t, group, key)) {
        const int64_t query =
            int64_t(t / group) * step.n_heads + kv_head * group + t % group;
        p = exp_negative(logits[j] - floats(step.lse, query).at[0]);
      }
      p_tile[own_query() * KEYS + own_lane() + j * LANES] = p;
    }
    barrier();
    if (thread() >= KEYS) continue;
    for (int i = 0; i < min(QUERIES, n_queries - first_query); ++i) {
      const int row = (first_query + i) / group;
      of_row += p_tile[i * KEYS + thread()];
      if ((first_query + i) % group < group - 1) continue;
      const float counted = of_row * decay_since(policy, segment.n_rows, row);
      received = questions ? max(received, counted) : received + counted;
      of_row = 0.0;
    }
  }
  const int i = first_key + thread();
  if (thread() >= KEYS || i >= n_keys) return;
  Floats score = score_of(step, keys, i);
  const bool is_new = i >= keys.kept && step.reads == 0;
  const float decay =
      step.reads != 0 ? 1.0 : decay_since(policy, segment.n_rows, first_counted - 1);
  score.at[0] = with_received(policy, is_new ? 0.0 : score.at[0] * decay, received);
}
