// y[i] += sum_j weights[i, j] * x[copy_rows[i, j]]
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 128) in;

layout(push_constant, scalar) uniform Push {
  uint64_t y, x, weights, copy_rows;
  int n, n_used;
};

void main() {
  const int64_t row = gl_WorkGroupID.x;
  Floats to = floats(y, row * n), w = floats(weights, row * n_used);
  Ints copies = ints(copy_rows, row * n_used);
  for (int i = int(gl_LocalInvocationIndex); i < n; i += 128) {
    float sum = to.at[i];
    for (int j = 0; j < n_used; ++j) {
      sum = fma(w.at[j], floats(x, int64_t(copies.at[j]) * n).at[i], sum);
    }
    to.at[i] = sum;
  }
}
