// layer_norm or rms_norm of a row; y may alias x.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define THREADS 128
layout(local_size_x = THREADS) in;
layout(constant_id = 0) const bool CENTERED = false;

layout(push_constant, scalar) uniform Push {
  uint64_t y, x, weight, bias;
  int n, n_rows, n_weights;  // rows of weights, which rows of x use in turn
  float eps;
};

#include "reduce.glsl"

void norm(int64_t row) {
  const int first = int(gl_LocalInvocationIndex);
  Floats from = floats(x, row * n), to = floats(y, row * n);
  float mean = 0.0;
  if (CENTERED) {
    float sum = 0.0;
    for (int i = first; i < n; i += THREADS) sum += from.at[i];
    mean = group_sum(sum) / float(n);
  }
  float squares = 0.0;
  for (int i = first; i < n; i += THREADS) {
    const float v = from.at[i] - mean;
    squares = fma(v, v, squares);
  }
  Floats weights = floats(weight, row % n_weights * n);
  const float scale = 1.0 / sqrt(group_sum(squares) / float(n) + eps);
  for (int i = first; i < n; i += THREADS) {
    const float v = (from.at[i] - mean) * scale * weights.at[i];
    to.at[i] = CENTERED ? v + Floats(bias).at[i] : v;
  }
}

void main() {
  for (int row = int(gl_WorkGroupID.x); row < n_rows; row += int(gl_NumWorkGroups.x)) norm(row);
}
