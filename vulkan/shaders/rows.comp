// Copies rows, or adds them, by index: lookups in a table of any type, and copies for experts.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const int TYPE = 0;
layout(constant_id = 1) const bool ADDS = false;
layout(constant_id = 2) const bool DISPATCHES = false;  // to[rows[i]] = from[i / n_used]

layout(push_constant, scalar) uniform Push {
  uint64_t to, from, codebook, rows;
  int64_t row_bytes;  // of `from`
  int n, n_rows, n_used;
};

#include "weights.glsl"

void main() {
  for (int i = int(gl_WorkGroupID.x); i < n_rows; i += int(gl_NumWorkGroups.x)) {
    const int index = Ints(rows).at[i];
    const uint64_t source = from + uint64_t((DISPATCHES ? i / n_used : index) * row_bytes);
    Floats target = floats(to, int64_t(DISPATCHES ? index : i) * n);
    for (int at = 8 * int(gl_LocalInvocationIndex); at < n; at += 8 * 64) {
      float w[8];
      load_eight_of(TYPE, source, at, n, w);
      for (int j = 0; j < 8 && at + j < n; ++j) {
        target.at[at + j] = ADDS ? target.at[at + j] + w[j] : w[j];
      }
    }
  }
}
