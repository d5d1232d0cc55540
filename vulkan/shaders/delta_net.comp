// The rule of Gated DeltaNet, row by row, for COLUMNS columns of a value head's state, which stay
// in registers: a thread has every GROUPS-th row of a column.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define COLUMNS 16     // kDeltaColumns
#define GROUPS 16      // of rows of a state
#define MOST_DIMS 256  // kMaxDeltaHead
layout(local_size_x = COLUMNS * GROUPS) in;

#include "delta.glsl"

shared float q[MOST_DIMS], k[MOST_DIMS];
shared float parts[GROUPS][COLUMNS];

// The sum over the groups of this thread's column.
float column_sum(float x) {
  const uint column = gl_LocalInvocationIndex % COLUMNS, group = gl_LocalInvocationIndex / COLUMNS;
  barrier();
  parts[group][column] = x;
  barrier();
  float sum = 0.0;
  for (int g = 0; g < GROUPS; ++g) sum += parts[g][column];
  return sum;
}

void main() {
  const int t = int(gl_LocalInvocationIndex), head = int(gl_WorkGroupID.y);
  const int column = t % COLUMNS, group = t / COLUMNS;
  Ints segment = Ints(segments + gl_WorkGroupID.x * 20);
  const int sequence = segment.at[0], first_row = segment.at[2], n_rows = segment.at[3];
  const int first = head * head_dim + int(gl_WorkGroupID.z) * COLUMNS;  // column of all heads'
  const int n = head_dim / GROUPS, k_width = n_k_heads * head_dim;
  const int k_head = adjacent != 0 ? head / (n_v_heads / n_k_heads) : head % n_k_heads;
  Floats state = floats(states, sequence * state_floats + int64_t(first) * head_dim + t);
  float s[MOST_DIMS / GROUPS];
  for (int j = 0; j < n; ++j) s[j] = state.at[j * COLUMNS * GROUPS];
  for (int64_t row = first_row; row < first_row + n_rows; ++row) {
    Floats x = floats(qkv, row * n_channels);
    if (t < head_dim) {
      q[t] = x.at[k_head * head_dim + t];
      k[t] = x.at[k_width + k_head * head_dim + t];
    }
    const float decay = floats(alpha, row * n_v_heads).at[head];
    const float rate = floats(beta, row * n_v_heads).at[head];
    const float v = x.at[2 * k_width + first + column];
    barrier();
    float sum = 0.0;
    for (int j = 0; j < n; ++j) sum = fma(s[j], k[j * GROUPS + group], sum);
    const float delta = rate * (v - decay * column_sum(sum));
    sum = 0.0;
    for (int j = 0; j < n; ++j) {
      s[j] = fma(delta, k[j * GROUPS + group], decay * s[j]);
      sum = fma(s[j], q[j * GROUPS + group], sum);
    }
    sum = column_sum(sum);
    if (group == 0) floats(result, row * n_v_heads * head_dim).at[first + column] = sum;
  }
  for (int j = 0; j < n; ++j) state.at[j * COLUMNS * GROUPS] = s[j];
}
