// The LargestLogits of a row, which is read twice. The first pass finds the largest logits of ROOM
// interleaved groups. The MOST-th largest of these is a threshold that at least MOST logits reach,
// and few more if the large ones are spread over the groups. The second pass gathers logits that
// reach the threshold, in any order, to be sorted. If there are more than ROOM, it gives up, and
// the host reads the row.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "logit_key.glsl"

#define THREADS 256
#define ROOM 1024
#define MOST 256
layout(local_size_x = THREADS) in;

layout(push_constant, scalar) uniform Push {
  uint64_t to;  // [n_rows] LargestLogits: n, rest, then MOST times token and value
  uint64_t x, temperatures;
  int n;
};

shared uint64_t keys[ROOM];
shared int n_found;

#include "reduce.glsl"

// A bitonic sort in descending order.
void sort_keys() {
  for (uint size = 2; size <= ROOM; size *= 2) {
    for (uint apart = size / 2; apart > 0; apart /= 2) {
      barrier();
      for (uint pair = gl_LocalInvocationIndex; pair < ROOM / 2; pair += THREADS) {
        const uint i = 2 * pair - (pair & (apart - 1));
        const uint64_t a = keys[i], b = keys[i + apart];
        if ((a < b) == ((i & size) == 0)) {
          keys[i] = b;
          keys[i + apart] = a;
        }
      }
    }
  }
  barrier();
}

void main() {
  const int t = int(gl_LocalInvocationIndex);
  Floats row = floats(x, int64_t(gl_WorkGroupID.x) * n);
  Words out_row = Words(to + uint64_t(gl_WorkGroupID.x) * (8 + 8 * MOST));
  const float temperature = Floats(temperatures).at[gl_WorkGroupID.x];
  for (int g = t; g < ROOM; g += THREADS) {
    uint64_t peak = key_of(-infinity(), -1);  // the token that sorts last
    for (int i = g; i < n; i += ROOM) {
      if (!is_nan(row.at[i])) peak = max(peak, key_of(row.at[i], -1));
    }
    keys[g] = peak;
  }
  if (t == 0) n_found = 0;
  sort_keys();
  const uint64_t bar = keys[MOST - 1];
  const float largest = logit_of(keys[0]);
  barrier();

  float rest = 0.0;
  for (int i = t; i < n; i += THREADS) {
    const float logit = row.at[i];
    if (is_nan(logit) || !(logit > -infinity())) continue;
    const uint64_t key = key_of(logit, i);
    if (key < bar) {
      rest += temperature > 0.0 ? exp_negative((logit - largest) / temperature) : 0.0;
    } else {
      const int at = atomicAdd(n_found, 1);
      if (at < ROOM) keys[at] = key;
    }
  }
  barrier();
  const int found = n_found;
  if (found > ROOM) {
    if (t == 0) out_row.at[0] = uint(-1);
    return;
  }
  for (int i = found + t; i < ROOM; i += THREADS) keys[i] = 0;
  sort_keys();
  for (int i = t; i < found; i += THREADS) {
    const float logit = logit_of(keys[i]);
    if (i < MOST) {
      out_row.at[2 + 2 * i] = uint(token_of(keys[i]));
      out_row.at[3 + 2 * i] = floatBitsToUint(logit);
    } else {
      rest += temperature > 0.0 ? exp_negative((logit - largest) / temperature) : 0.0;
    }
  }
  rest = group_sum(rest);
  if (t > 0) return;
  out_row.at[0] = uint(min(found, MOST));
  out_row.at[1] = floatBitsToUint(rest);
}
