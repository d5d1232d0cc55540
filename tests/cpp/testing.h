// Shared by the tests: random numbers, bits, and rounding error bounds.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace h2o {

// With H2O_TEST_BRIEF, similar cases are tested in part, as .ci/run does. .ci/sanitizers tests all
// of them.
inline bool brief() {
  static const bool is_set = std::getenv("H2O_TEST_BRIEF") != nullptr;
  return is_set;
}

// Unit roundoff of f32.
constexpr double kUnit = 0x1p-24;

// Relative error bound of n roundings (Higham, Accuracy and Stability, lemma 3.1).
inline double gamma(int64_t n) {
  const double nu = static_cast<double>(n) * kUnit;
  return nu / (1 - nu);
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint32_t bits() { return static_cast<uint32_t>(engine_()); }

  // In [least, most].
  int32_t integer(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(engine_);
  }
  float real(float least, float most) {
    return std::uniform_real_distribution<float>(least, most)(engine_);
  }
  std::vector<float> reals(int64_t n, float least = -2, float most = 2) {
    std::vector<float> values(n);
    for (float& value : values) value = real(least, most);
    return values;
  }

  bool flip() { return integer(0, 1) == 1; }

 private:
  std::mt19937_64 engine_;
};

inline bool same_bits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) return false;
  }
  return true;
}

// The value of an f16 and a bf16 according to IEEE 754: sign, exponent, fraction.
inline double f16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  const double magnitude = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 != 0 ? -magnitude : magnitude;
}
inline double bf16_value(uint16_t bits) {
  const int exponent = bits >> 7 & 255;
  const int fraction = bits & 127;
  const double magnitude = exponent == 255 ? (fraction == 0 ? INFINITY : NAN)
                           : exponent == 0 ? std::ldexp(fraction, -133)
                                           : std::ldexp(128 + fraction, exponent - 134);
  return bits >> 15 != 0 ? -magnitude : magnitude;
}

// Does Linux report a feature of AMX, and permit this process to use it?
inline bool linux_lends_tiles([[maybe_unused]] std::string_view feature) {
#if defined(__linux__) && defined(__x86_64__)
  std::ifstream file("/proc/cpuinfo");
  for (std::string word; file >> word;) {
    if (word == feature) return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  }
#endif
  return false;
}

#ifdef __x86_64__
// Zig's runtime library, an alternative, does not know any CPU.
enum CpuidRegister { kEax, kEbx, kEcx, kEdx };
inline bool cpuid_bit(uint32_t leaf, uint32_t subleaf, CpuidRegister reg, int bit) {
  uint32_t r[4] = {};
  __get_cpuid_count(leaf, subleaf, &r[kEax], &r[kEbx], &r[kEcx], &r[kEdx]);
  return (r[reg] >> bit & 1) != 0;
}
#endif

// Does this CPU support the instruction set of that name, if kernels were built for it? Determined
// by the CPU or the operating system, independently of h2o. True for unknown names, which h2o
// rejects.
inline bool cpu_has(std::string_view isa) {
  const bool is_one = isa.starts_with("x86_64_") || isa.starts_with("neon");
  const std::string built = " " H2O_ISAS " ";
  if (is_one && built.find(" " + std::string(isa) + " ") == std::string::npos) return false;
#ifdef __x86_64__
  const bool v3 = cpuid_bit(7, 0, kEbx, 5) && cpuid_bit(7, 0, kEbx, 8) && cpuid_bit(1, 0, kEcx, 12);
  bool v4 = v3;
  for (int bit : {16, 17, 28, 30, 31}) v4 = v4 && cpuid_bit(7, 0, kEbx, bit);
  const bool vnni = v4 && cpuid_bit(7, 0, kEcx, 11);
  const bool bf16 = vnni && cpuid_bit(7, 1, kEax, 5);
  if (isa == "x86_64_v3") return v3;
  if (isa == "x86_64_v3_vnni") return v3 && cpuid_bit(7, 1, kEax, 4);
  if (isa == "x86_64_v4") return v4;
  if (isa == "x86_64_v4_vnni") return vnni;
  if (isa == "x86_64_v4_bf16") return bf16;
  if (isa == "x86_64_v4_amx_int8") return vnni && linux_lends_tiles("amx_int8");
  if (isa == "x86_64_v4_amx") {
    return bf16 && linux_lends_tiles("amx_int8") && linux_lends_tiles("amx_bf16");
  }
#elif defined(__aarch64__)
  if (isa == "neon") return true;
#ifdef __linux__
  if (isa == "neon_dotprod") {
    uint64_t features;  // reported by the kernel instead of the register; bits 44 to 47: DP
    __asm__("mrs %0, ID_AA64ISAR0_EL1" : "=r"(features));
    return (features >> 44 & 15) != 0;
  }
#else
  if (isa == "neon_dotprod") return true;
#endif
#endif
  return !is_one;
}

}  // namespace h2o
