#include "cpu/isa/detect.h"

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "built_isas.h"
#include "core/error.h"

#ifdef __x86_64__
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace h2o {

#define H2O_DECLARE(isa) extern const CpuKernels kernels_##isa;
H2O_FOR_EACH_WHOLE_UNIT(H2O_DECLARE)
#define H2O_DECLARE_EXTENSION(isa, extended) extern const ProductKernels kernels_##isa;
H2O_FOR_EACH_EXTENSION(H2O_DECLARE_EXTENSION)

namespace {

// For each instruction set that a unit can be built for: does this CPU support it?
[[maybe_unused]] bool has_scalar() { return true; }

#ifdef __x86_64__

struct CpuidRegisters {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidRegisters cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  CpuidRegisters r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx,
                    &r.edx);  // leaves zeros if the leaf does not exist
  return r;
}

// The register state saved by the operating system (XCR0).
uint64_t saved_state() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

bool has(uint32_t bits, std::initializer_list<int> wanted) {
  for (int bit : wanted) {
    if ((bits >> bit & 1) == 0) return false;
  }
  return true;
}

// x86-64-v3: SSE3, SSSE3, FMA, CX16, SSE4.1, SSE4.2, MOVBE, POPCNT, OSXSAVE, AVX, F16C; BMI1,
// AVX2, BMI2; LZCNT. The operating system saves XMM and YMM.
[[maybe_unused]] bool has_x86_64_v3() {
  const CpuidRegisters leaf1 = cpuid(1);
  return has(leaf1.ecx, {0, 9, 12, 13, 19, 20, 22, 23, 27, 28, 29}) &&
         has(cpuid(7).ebx, {3, 5, 8}) && has(cpuid(0x80000001).ecx, {5}) &&
         (saved_state() & 0x6) == 0x6;
}

// AVX-VNNI.
[[maybe_unused]] bool has_x86_64_v3_vnni() { return has_x86_64_v3() && has(cpuid(7, 1).eax, {4}); }

// x86-64-v4: AVX-512 F, DQ, CD, BW, VL. The operating system saves masks and ZMM too.
bool has_x86_64_v4() {
  return has_x86_64_v3() && has(cpuid(7).ebx, {16, 17, 28, 30, 31}) &&
         (saved_state() & 0xe6) == 0xe6;
}

// AVX-512 VNNI.
[[maybe_unused]] bool has_x86_64_v4_vnni() { return has_x86_64_v4() && has(cpuid(7).ecx, {11}); }

// AVX-512 BF16.
[[maybe_unused]] bool has_x86_64_v4_bf16() {
  return has_x86_64_v4_vnni() && has(cpuid(7, 1).eax, {5});
}

// Intel's vector units compute as many products per second in float as in bf16, and float needs no
// rounding. Tiles compute more.
bool gains_from_bf16(const CpuKernels& kernels) {
  constexpr uint32_t kGenu = 0x756e6547;  // the beginning of "GenuineIntel"
  return cpuid(0).ebx != kGenu || std::string_view(kernels.isa) == "x86_64_v4_amx";
}

// Zen 4 reads weights up to 1.5 times as fast with its own prefetchers alone
// (docs/measured/performance.md).
bool gains_from_prefetch() {
  constexpr uint32_t kAuth = 0x68747541;  // the beginning of "AuthenticAMD"
  const uint32_t signature = cpuid(1).eax;
  const uint32_t family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
  const bool is_zen4 = cpuid(0).ebx == kAuth && family == 0x19 && has_x86_64_v4();  // not Zen 3
  return !is_zen4;
}

// Requests permission to use AMX tiles from Linux. Can be called repeatedly.
[[maybe_unused]] bool may_use_tiles() {
#ifdef __linux__
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTiles = 18;                  // of XCR0
  return syscall(SYS_arch_prctl, kRequestPermission, kTiles) == 0;
#else
  return false;
#endif
}

// AMX-TILE, AMX-INT8. The operating system saves the tiles and their configuration.
[[maybe_unused]] bool has_x86_64_v4_amx_int8() {
  return has_x86_64_v4_vnni() && has(cpuid(7).edx, {24, 25}) &&
         (saved_state() & 0x60000) == 0x60000 && may_use_tiles();
}

// AMX-BF16 too.
[[maybe_unused]] bool has_x86_64_v4_amx() {
  return has_x86_64_v4_amx_int8() && has_x86_64_v4_bf16() && has(cpuid(7).edx, {22});
}

#else

bool gains_from_bf16(const CpuKernels&) { return true; }
bool gains_from_prefetch() { return true; }

#endif
#ifdef __aarch64__

[[maybe_unused]] bool has_neon() { return true; }

// Dot products of bytes, of Arm v8.2.
[[maybe_unused]] bool has_neon_dotprod() {
#ifdef __APPLE__
  return true;  // every Mac with such a CPU
#elif defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}

#endif

CpuKernels tuned(CpuKernels kernels) {
  kernels.prefetches = gains_from_prefetch();
  return kernels;
}

// `kernels` with other products.
[[maybe_unused]] CpuKernels extend(CpuKernels kernels, const ProductKernels& by) {
  kernels.isa = by.isa;
  if (by.round_rows != nullptr) {
    kernels.round_rows = by.round_rows;
    kernels.f16.bf16_matmul = by.f16;
    kernels.bf16.bf16_matmul = by.bf16;
    kernels.f16.bf16_attention = by.f16_attention;
    kernels.bf16.bf16_attention = by.bf16_attention;
  }
  if (by.quantize_rows != nullptr) {
    kernels.quantize_rows = by.quantize_rows;
    kernels.row_multiple = by.row_multiple;
    for (const Int8Kernels& int8 : std::span(by.int8, by.n_int8)) {
      TypeKernels& type = kernels.*int8.type;
      type.int8_matmul = int8.int8_matmul;
      type.interleaved_matmul = int8.interleaved_matmul;
    }
  }
  if (by.multiply_split != nullptr) {
    kernels.multiply_split = by.multiply_split;
    for (const SplitType& split : std::span(by.split, by.n_split)) {
      (kernels.*split.type).split = &split.kernels;
    }
  }
  return kernels;
}

#define H2O_TABLE(isa)                                    \
  const CpuKernels& table_##isa() {                       \
    static const CpuKernels table = tuned(kernels_##isa); \
    return table;                                         \
  }
H2O_FOR_EACH_WHOLE_UNIT(H2O_TABLE)
#define H2O_EXTENDED_TABLE(isa, extended)                                      \
  const CpuKernels& table_##isa() {                                            \
    static const CpuKernels table = extend(table_##extended(), kernels_##isa); \
    return table;                                                              \
  }
H2O_FOR_EACH_EXTENSION(H2O_EXTENDED_TABLE)

}  // namespace

std::vector<const CpuKernels*> supported_kernels() {
  std::vector<const CpuKernels*> tables;
#define H2O_ADD(isa) \
  if (has_##isa()) tables.push_back(&table_##isa());
  H2O_FOR_EACH_ISA(H2O_ADD)
  return tables;
}

const CpuKernels& choose_kernels(const std::string& isa, bool exact) {
  const std::vector<const CpuKernels*> tables = supported_kernels();
  std::string names;
  bool is_found = isa.empty();
  for (const CpuKernels* table : tables) {
    is_found = is_found || isa == table->isa;
    const bool rounds = table->round_rows != nullptr;
    const bool is_skipped = rounds && (exact || (isa.empty() && !gains_from_bf16(*table)));
    if (is_found && !is_skipped) return *table;
    names += concat(names.empty() ? "" : ", ", table->isa);
  }
  throw InvalidArgument(
      concat("instruction set '", isa, "' is not supported by this CPU: ", names));
}

}  // namespace h2o
