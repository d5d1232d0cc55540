// The decay and the rate of each head of a row; and a DeltaNet's q and k, which are normalized, one
// head per workgroup.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define THREADS 64
layout(local_size_x = THREADS) in;

#include "scan.glsl"
#include "reduce.glsl"

void main() {
  const int t = int(gl_LocalInvocationIndex), head = int(gl_WorkGroupID.y) - 1;
  const int64_t row = gl_WorkGroupID.x;
  if (head < 0) {
    Floats to_decay = floats(decay, row * n_heads), to_rate = floats(rate, row * n_heads);
    for (int h = t; h < n_heads; h += THREADS) {
      const float beta = to_rate.at[h];
      const float x = (DELTA ? to_decay.at[h] : beta) + Floats(dt_bias).at[h];
      const float softplus = x > 20.0 ? x : log1p_of(exp_of(x));
      to_decay.at[h] = exp_of(Floats(a).at[h] * softplus);
      to_rate.at[h] = DELTA ? sigmoid(beta) : softplus;
    }
    return;
  }
  Floats x = floats(inputs, row * n_channels + head * d_state);
  float sum = 0.0;
  for (int i = t; i < d_state; i += THREADS) sum = fma(x.at[i], x.at[i], sum);
  const float size = head < n_k_heads ? 1.0 / sqrt(float(d_state)) : 1.0;
  const float factor = size / sqrt(group_sum(sum) + 1e-6);
  for (int i = t; i < d_state; i += THREADS) x.at[i] *= factor;
}
