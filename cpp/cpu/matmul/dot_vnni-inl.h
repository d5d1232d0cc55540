// Dot products of signed bytes, where dot() is an instruction that multiplies unsigned by signed
// ones.
#pragma once

namespace h2o {
namespace {

constexpr int kLargestPair = 0;  // no 16-bit sums

// w + 128 is unsigned; 128 times the sum of x is subtracted.
int32_t signed_start(int32_t sum_of_x) { return -128 * sum_of_x; }
Ints signed_dot(Ints sums, Ints w, Ints x) {
  constexpr int32_t kSignBits = -0x7f7f7f80;  // 0x80808080
  return dot(sums, bit_xor(w, ints(kSignBits)), x);
}

}  // namespace
}  // namespace h2o
