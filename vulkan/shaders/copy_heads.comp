// Copies the first `width` floats of each head of each row.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 64) in;

layout(push_constant, scalar) uniform Push {
  uint64_t to, from;
  int64_t to_row, to_head, from_row, from_head;  // floats between rows and between heads
  int n_heads, width;
};

void main() {
  const int64_t row = gl_WorkGroupID.x;
  for (int h = int(gl_WorkGroupID.y); h < n_heads; h += int(gl_NumWorkGroups.y)) {
    Floats a = floats(to, row * to_row + h * to_head);
    Floats b = floats(from, row * from_row + h * from_head);
    for (int i = int(gl_LocalInvocationIndex); i < width; i += 64) a.at[i] = b.at[i];
  }
}
