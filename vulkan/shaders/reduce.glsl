// Sums and maxima over a workgroup of THREADS, in the same order on every device.
shared float reduced[THREADS];

float group_sum(float x) {
  const uint t = gl_LocalInvocationIndex;
  barrier();
  reduced[t] = x;
  barrier();
  for (uint apart = THREADS / 2; apart > 0; apart /= 2) {
    if (t < apart) reduced[t] += reduced[t + apart];
    barrier();
  }
  return reduced[0];
}

float group_max(float x) {
  const uint t = gl_LocalInvocationIndex;
  barrier();
  reduced[t] = x;
  barrier();
  for (uint apart = THREADS / 2; apart > 0; apart /= 2) {
    if (t < apart) reduced[t] = max(reduced[t], reduced[t + apart]);
    barrier();
  }
  return reduced[0];
}
