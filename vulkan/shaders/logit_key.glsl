// A logit, which is not NaN, and its token as one positive integer; more likely is larger, ties:
// the lower token. Both zeros are equal.
uint64_t key_of(float logit, int token) {
  uint bits = floatBitsToUint(logit);
  if (bits == 0x80000000u) bits = 0u;
  const uint order = (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
  return uint64_t(order) << 32 | uint64_t(~uint(token));
}
int token_of(uint64_t key) { return int(~uint(key & 0xffffffffUL)); }
float logit_of(uint64_t key) {
  const uint order = uint(key >> 32);
  return uintBitsToFloat((order >> 31) != 0u ? order & 0x7fffffffu : ~order);
}
