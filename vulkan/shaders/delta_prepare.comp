// Normalizes a row's q and k, one head per workgroup; the last one computes its gates.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define THREADS 64
layout(local_size_x = THREADS) in;

#include "delta.glsl"
#include "reduce.glsl"

void main() {
  const int t = int(gl_LocalInvocationIndex), head = int(gl_WorkGroupID.y);
  const int64_t row = gl_WorkGroupID.x;
  if (head == 2 * n_k_heads) {
    Floats to_alpha = floats(alpha, row * n_v_heads), to_beta = floats(beta, row * n_v_heads);
    for (int h = t; h < n_v_heads; h += THREADS) {
      const float x = to_alpha.at[h] + Floats(dt_bias).at[h];
      const float softplus = x > 20.0 ? x : log1p_of(exp_of(x));
      to_alpha.at[h] = exp_of(Floats(a).at[h] * softplus);
      to_beta.at[h] = sigmoid(to_beta.at[h]);
    }
    return;
  }
  Floats x = floats(qkv, row * n_channels + head * head_dim);
  float sum = 0.0;
  for (int i = t; i < head_dim; i += THREADS) sum = fma(x.at[i], x.at[i], sum);
  const float size = head < n_k_heads ? 1.0 / sqrt(float(head_dim)) : 1.0;
  const float factor = size / sqrt(group_sum(sum) + 1e-6);
  for (int i = t; i < head_dim; i += THREADS) x.at[i] *= factor;
}
