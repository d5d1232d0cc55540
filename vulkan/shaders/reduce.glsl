// Sums and maxima over a workgroup of THREADS.
#include "join.glsl"

shared float reduced[THREADS];

float plus(float a, float b) { return a + b; }

float group_sum(float x) {
  JOIN_ALL(reduced, x, plus)
  return reduced[0];
}

float group_max(float x) {
  JOIN_ALL(reduced, x, max)
  return reduced[0];
}
