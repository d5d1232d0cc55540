#include "cpu/isa/detect.h"

#include <cstdint>
#include <initializer_list>

#include "core/error.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace h2o {

extern const CpuKernels kernels_scalar;
#ifdef __x86_64__
extern const CpuKernels kernels_x86_64_v3;
extern const CpuKernels kernels_x86_64_v4;
extern const CpuKernels kernels_x86_64_v4_vnni;
extern const CpuKernels kernels_x86_64_v4_bf16;
extern const CpuKernels kernels_x86_64_v4_amx;

namespace {

struct CpuidRegisters {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidRegisters cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  CpuidRegisters r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx,
                    &r.edx);  // leaves zeros if there is no leaf
  return r;
}

// The register state that the operating system saves (XCR0).
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
bool has_x86_64_v3() {
  const CpuidRegisters leaf1 = cpuid(1);
  return has(leaf1.ecx, {0, 9, 12, 13, 19, 20, 22, 23, 27, 28, 29}) &&
         has(cpuid(7).ebx, {3, 5, 8}) && has(cpuid(0x80000001).ecx, {5}) &&
         (saved_state() & 0x6) == 0x6;
}

// x86-64-v4: AVX-512 F, DQ, CD, BW, VL. The operating system saves masks and ZMM too.
bool has_x86_64_v4() {
  return has_x86_64_v3() && has(cpuid(7).ebx, {16, 17, 28, 30, 31}) &&
         (saved_state() & 0xe6) == 0xe6;
}

// AVX-512 VNNI.
bool has_x86_64_v4_vnni() { return has_x86_64_v4() && has(cpuid(7).ecx, {11}); }

#ifdef H2O_HAS_X86_64_V4_BF16
// AVX-512 BF16.
bool has_x86_64_v4_bf16() { return has_x86_64_v4_vnni() && has(cpuid(7, 1).eax, {5}); }
#endif

#ifdef H2O_HAS_X86_64_V4_AMX
// Linux saves the tiles of a process that asked for them. May be asked again.
bool may_use_tiles() {
#ifdef __linux__
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTiles = 18;                  // of XCR0
  return syscall(SYS_arch_prctl, kRequestPermission, kTiles) == 0;
#else
  return false;
#endif
}

// AMX-BF16, AMX-TILE. The operating system saves the tiles and their configuration.
bool has_x86_64_v4_amx() {
  return has_x86_64_v4_bf16() && has(cpuid(7).edx, {22, 24}) &&
         (saved_state() & 0x60000) == 0x60000 && may_use_tiles();
}
#endif

}  // namespace
#endif

std::vector<const CpuKernels*> supported_kernels() {
  std::vector<const CpuKernels*> tables;
#ifdef __x86_64__
#ifdef H2O_HAS_X86_64_V4_AMX
  if (has_x86_64_v4_amx()) tables.push_back(&kernels_x86_64_v4_amx);
#endif
#ifdef H2O_HAS_X86_64_V4_BF16
  if (has_x86_64_v4_bf16()) tables.push_back(&kernels_x86_64_v4_bf16);
#endif
  if (has_x86_64_v4_vnni()) tables.push_back(&kernels_x86_64_v4_vnni);
  if (has_x86_64_v4()) tables.push_back(&kernels_x86_64_v4);
  if (has_x86_64_v3()) tables.push_back(&kernels_x86_64_v3);
#endif
  tables.push_back(&kernels_scalar);
  return tables;
}

const CpuKernels& choose_kernels(const std::string& isa) {
  const std::vector<const CpuKernels*> tables = supported_kernels();
  if (isa.empty()) return *tables.front();
  std::string names;
  for (const CpuKernels* table : tables) {
    if (isa == table->isa) return *table;
    names += text(names.empty() ? "" : ", ", table->isa);
  }
  throw InvalidArgument(
      text("[cpu] instruction set '", isa, "' is not one this CPU runs: ", names));
}

}  // namespace h2o
