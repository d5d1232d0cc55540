// The indices of the copies of rows for one expert, in row order; after route.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#define THREADS 128
layout(local_size_x = THREADS) in;

layout(push_constant, scalar) uniform Push {
  uint64_t experts, copy_rows, offsets;  // experts: [n_rows, n_experts], the first n_used of a row
  int n_rows, n_experts, n_used;
};

shared ivec2 scan[THREADS];  // copies of lower experts, and of this one

void main() {
  const int t = int(gl_LocalInvocationIndex), e = int(gl_WorkGroupID.x);
  const int n_copies = n_rows * n_used;
  const int each = (n_copies + THREADS - 1) / THREADS, begin = t * each;
  const int end = min(begin + each, n_copies);
  ivec2 own = ivec2(0);
  for (int i = begin; i < end; ++i) {
    const int expert = ints(experts, int64_t(i / n_used) * n_experts).at[i % n_used];
    own += ivec2(expert < e ? 1 : 0, expert == e ? 1 : 0);
  }
  scan[t] = own;
  barrier();
  ivec2 before = ivec2(0);
  int lower = 0;
  for (int i = 0; i < THREADS; ++i) {
    if (i < t) before += scan[i];
    lower += scan[i].x;
  }
  if (t == 0) {
    Ints(offsets).at[e] = lower;
    if (e == n_experts - 1) Ints(offsets).at[e + 1] = n_copies;
  }
  int at = lower + before.y;
  for (int i = begin; i < end; ++i) {
    const int expert = ints(experts, int64_t(i / n_used) * n_experts).at[i % n_used];
    if (expert == e) Ints(copy_rows).at[i] = at++;
  }
}
