// Selects the experts of a row and computes their weights; see Backend::route(). The experts
// overwrite the logits, as bits, for place.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "logit_key.glsl"

#define THREADS 64
#define MOST_EXPERTS 1024
layout(local_size_x = THREADS) in;

layout(push_constant, scalar) uniform Push {
  uint64_t logits, bias, weights, selected, expert_scales;
  int n_experts, n_used, by_sigmoid, n_groups, n_groups_used, normalized;
  float scale;
};

shared uint64_t keys[MOST_EXPERTS];
shared uint64_t best_of[THREADS];

#include "reduce.glsl"

uint64_t largest_key(uint64_t key) {
  JOIN_ALL(best_of, key, max)
  return best_of[0];
}

uint64_t key_or_lowest(float x, int token) {
  return key_of(is_nan(x) ? -infinity() : x, token);
}

// Removes the experts outside the groups whose two largest scores have the largest sums.
void keep_groups() {
  const int t = int(gl_LocalInvocationIndex), size = n_experts / n_groups;
  uint64_t sum = 0;
  if (t < n_groups) {
    uint64_t most = 0, second = 0;
    for (int e = t * size; e < (t + 1) * size; ++e) {
      second = max(second, min(most, keys[e]));
      most = max(most, keys[e]);
    }
    sum = key_or_lowest(logit_of(most) + (size > 1 ? logit_of(second) : 0.0), t);
  }
  uint kept = 0u;
  for (int j = 0; j < n_groups_used; ++j) {
    const uint64_t best = largest_key(sum);
    kept |= 1u << token_of(best);
    if (sum == best) sum = 0;
  }
  barrier();
  for (int e = t; e < n_experts; e += THREADS) {
    if ((kept >> e / size & 1u) == 0u) keys[e] = 0;
  }
}

void main() {
  const int t = int(gl_LocalInvocationIndex);
  const int64_t row = gl_WorkGroupID.x;
  Floats x = floats(logits, row * n_experts);
  float largest = -infinity(), total = 0.0;
  if (by_sigmoid == 0) {
    for (int e = t; e < n_experts; e += THREADS) {
      if (!is_nan(x.at[e])) largest = max(largest, x.at[e]);
    }
    largest = group_max(largest);
    for (int e = t; e < n_experts; e += THREADS) total += exp_of(x.at[e] - largest);
    total = group_sum(total);
  }
  // The softmax keeps the order of the logits.
  const bool by_score = by_sigmoid != 0 || bias != 0 || n_groups > 1;
  for (int e = t; e < n_experts; e += THREADS) {
    float value = x.at[e];
    if (by_score) {
      value = by_sigmoid != 0 ? sigmoid(value) : exp_of(value - largest) / total;
      if (bias != 0) value += Floats(bias).at[e];
    }
    keys[e] = key_or_lowest(value, e);
  }
  barrier();
  if (n_groups > 1) keep_groups();

  Floats to = floats(weights, row * n_used);
  Ints chosen = ints(selected, row * n_used);
  float sum = 1e-20;  // sigmoids may all be 0
  for (int j = 0; j < n_used; ++j) {
    uint64_t best = 0;
    for (int e = t; e < n_experts; e += THREADS) best = max(best, keys[e]);
    best = largest_key(best);
    const int e = token_of(best);
    const float logit = x.at[e];
    const float weight = by_sigmoid != 0 ? sigmoid(logit) : exp_of(logit - largest) / total;
    sum += weight;
    if (t == 0) {
      keys[e] = 0;
      to.at[j] = weight;
      chosen.at[j] = e;
    }
    barrier();
  }
  if (t > 0) return;
  const float factor = normalized != 0 ? scale / sum : scale;
  for (int j = 0; j < n_used; ++j) {
    const int e = chosen.at[j];
    to.at[j] *= expert_scales != 0 ? factor * Floats(expert_scales).at[e] : factor;
    x.at[j] = uintBitsToFloat(uint(e));
  }
}
