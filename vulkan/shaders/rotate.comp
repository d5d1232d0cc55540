// Rotates all heads of a row of x by its position in its segment's sequence.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "rope.glsl"

layout(local_size_x = 64) in;

layout(push_constant, scalar) uniform Push {
  uint64_t x, segments, segment_of, frequencies;
  int n, head_dim, pairs, n_half;  // n_half: pairs of a head that are rotated
  float magnitude;
};

void main() {
  Floats row = floats(x, int64_t(gl_WorkGroupID.x) * n);
  const int own = int(gl_WorkGroupID.x);
  Ints segment = Ints(segments + uint64_t(Ints(segment_of).at[own] * kSegmentBytes));
  const int position = segment.at[1] + own - segment.at[2];
  for (int i = int(gl_LocalInvocationIndex); i < n_half; i += 64) {
    const vec2 angle = rope_angle(frequencies, magnitude, position, i);
    const int first = pairs != 0 ? 2 * i : i, apart = pairs != 0 ? 1 : n_half;
    for (int at = first; at < n; at += head_dim) {
      const vec2 pair = turned(angle, row.at[at], row.at[at + apart]);
      row.at[at] = pair.x;
      row.at[at + apart] = pair.y;
    }
  }
}
