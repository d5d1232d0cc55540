// rope_table [n, n_rot]: cosines, then sines, of each position.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "rope.glsl"

layout(local_size_x = 64) in;

layout(push_constant, scalar) uniform Push {
  uint64_t rope_table, frequencies;
  int n_rows, n_half;
  float magnitude;
};

void main() {
  for (int position = int(gl_WorkGroupID.x); position < n_rows;
       position += int(gl_NumWorkGroups.x)) {
    Floats row = floats(rope_table, int64_t(position) * 2 * n_half);
    for (int i = int(gl_LocalInvocationIndex); i < n_half; i += 64) {
      const vec2 angle = rope_angle(frequencies, magnitude, position, i);
      row.at[i] = angle.x;
      row.at[n_half + i] = angle.y;
    }
  }
}
