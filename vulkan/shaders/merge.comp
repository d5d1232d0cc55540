// Merges the splits of attend.comp: a workgroup for each query.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "kv.glsl"
#include "kv_types.glsl"
#include "tiles.glsl"

layout(push_constant, scalar) uniform Push {
  Step step;
  int first_segment, n_segments, n_per_segment, n_splits, decodes;
};

void main() {
  const int index = int(gl_WorkGroupID.x), head = int(gl_WorkGroupID.y);
  const Segment segment = segment_at(step, first_segment + index / n_per_segment);
  if ((segment.n_rows == 1) != (decodes != 0)) return;
  const int row = index % n_per_segment;
  const int group = step.n_heads / step.n_kv_heads;
  const Keys keys = keys_of(step, segment, head / group);
  const int size = split_length(keys.kept + segment.n_rows, n_splits, decodes != 0);
  const int n = (keys.kept + row) / size + 1;  // splits with a key that the row sees
  const int64_t query = int64_t(decodes != 0 ? segment.sequence : row) * step.n_heads + head;
  Floats shift = floats(step.partial_shift, query * n_splits);
  Floats part = floats(step.partial_total, query * n_splits);
  Floats sums = floats(step.partial_out, query * n_splits * step.head_dim);

  float largest = step.sinks != 0 ? sink_of(step, head) : -largest_float();
  float total = 0.0;
  for (int s = 0; s < n; ++s) largest = max(largest, shift.at[s]);
  if (step.sinks != 0) total = exp_negative(sink_of(step, head) - largest);
  for (int s = 0; s < n; ++s) total = fma(exp_negative(shift.at[s] - largest), part.at[s], total);
  total = max(total, 1e-37);
  Floats to = floats(step.result,
                     (int64_t(segment.row + row) * step.n_heads + head) * step.head_dim);
  for (int d = thread(); d < step.head_dim; d += THREADS) {
    float sum = 0.0;
    for (int s = 0; s < n; ++s) {
      sum = fma(exp_negative(shift.at[s] - largest), sums.at[s * step.head_dim + d], sum);
    }
    to.at[d] = sum / total;
  }
  if (thread() == 0 && step.lse != 0) floats(step.lse, query).at[0] = largest + log_of(total);
}
