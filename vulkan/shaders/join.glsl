// Joins the values of a workgroup's THREADS threads in `all`, a shared array, in the same order on
// every device: all[0] = join(join(...), join(...)). `own`: this thread's.
#define JOIN_ALL(all, own, join)                                                       \
  barrier();                                                                           \
  all[gl_LocalInvocationIndex] = own;                                                  \
  barrier();                                                                           \
  for (uint apart = THREADS / 2; apart > 0; apart /= 2) {                              \
    const uint t = gl_LocalInvocationIndex;                                            \
    if (t < apart) all[t] = join(all[t], all[t + apart]);                              \
    barrier();                                                                         \
  }
