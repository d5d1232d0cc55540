// The rule of Gated DeltaNet or of a StateSpace, row by row, for COLUMNS columns of a head's state,
// which stay in registers: a thread has every GROUPS-th row of a column.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define COLUMNS 16  // kDeltaColumns
#define GROUPS 16   // of rows of a state
layout(local_size_x = COLUMNS * GROUPS) in;
layout(constant_id = 1) const int OWN = 1;  // rows of a thread
const int MOST_ROWS = OWN * GROUPS;

#include "scan.glsl"

shared float q[MOST_ROWS], k[MOST_ROWS];
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
  Ints segment = Ints(segments + gl_WorkGroupID.x * kSegmentBytes);
  const int sequence = segment.at[0], first_row = segment.at[2], n_rows = segment.at[3];
  const int first = head * head_dim + int(gl_WorkGroupID.z) * COLUMNS;  // column of all heads'
  const int k_head = adjacent != 0 ? head / (n_heads / n_k_heads) : head % n_k_heads;
  Floats state = floats(states, sequence * state_floats + int64_t(first) * d_state + t);
  float s[OWN];
  for (int j = 0; j < OWN; ++j) {
    s[j] = j * GROUPS + group < d_state ? state.at[j * COLUMNS * GROUPS] : 0.0;
  }
  for (int64_t row = first_row; row < first_row + n_rows; ++row) {
    Floats x = floats(inputs, row * n_channels);
    for (int i = t; i < MOST_ROWS; i += COLUMNS * GROUPS) {
      q[i] = i < d_state ? x.at[first_q + k_head * d_state + i] : 0.0;
      k[i] = i < d_state ? x.at[first_k + k_head * d_state + i] : 0.0;
    }
    const float kept = floats(decay, row * n_heads).at[head];
    const float v = x.at[first_v + first + column];
    barrier();
    float delta = v, sum = 0.0;
    if (DELTA) {
      for (int j = 0; j < OWN; ++j) sum = fma(s[j], k[j * GROUPS + group], sum);
      delta -= kept * column_sum(sum);
    }
    delta *= floats(rate, row * n_heads).at[head];
    sum = 0.0;
    for (int j = 0; j < OWN; ++j) {
      s[j] = fma(delta, k[j * GROUPS + group], kept * s[j]);
      sum = fma(s[j], q[j * GROUPS + group], sum);
    }
    sum = column_sum(sum);
    if (!DELTA) sum = fma(Floats(d).at[head], v, sum);
    if (group == 0) floats(result, row * n_heads * head_dim).at[first + column] = sum;
  }
  for (int j = 0; j < OWN; ++j) {
    if (j * GROUPS + group < d_state) state.at[j * COLUMNS * GROUPS] = s[j];
  }
}
