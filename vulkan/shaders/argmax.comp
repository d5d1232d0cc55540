// The index of the largest element of a row; ties: the lower index. NaN sorts below every number.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "logit_key.glsl"

#define THREADS 256
layout(local_size_x = THREADS) in;

layout(push_constant, scalar) uniform Push {
  uint64_t tokens, x;
  int n;
};

shared uint64_t keys[THREADS];

#include "join.glsl"

void main() {
  const uint t = gl_LocalInvocationIndex;
  Floats row = floats(x, int64_t(gl_WorkGroupID.x) * n);
  uint64_t best = 0;
  for (int i = int(t); i < n; i += THREADS) {
    if (!is_nan(row.at[i])) best = max(best, key_of(row.at[i], i));
  }
  JOIN_ALL(keys, best, max)
  if (t == 0) Ints(tokens).at[gl_WorkGroupID.x] = keys[0] == 0 ? 0 : token_of(keys[0]);
}
