// x[i] *= a factor: by position (queries of long contexts), or the sigmoid of gate[i].
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const bool BY_POSITION = false;

layout(push_constant, scalar) uniform Push {
  uint64_t x, values;  // positions [n_rows], or gate [n_rows, 1]
  int n, n_rows, length, offset;
  float scale;
};

void main() {
  for (int row = int(gl_WorkGroupID.x); row < n_rows; row += int(gl_NumWorkGroups.x)) {
    const float factor =
        BY_POSITION ? 1.0 + scale * log_of(1.0 + float((Ints(values).at[row] + offset) / length))
                    : sigmoid(Floats(values).at[row]);
    Floats to = floats(x, int64_t(row) * n);
    for (int i = int(gl_LocalInvocationIndex); i < n; i += 64) to.at[i] *= factor;
  }
}
