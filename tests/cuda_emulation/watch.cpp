#include "watch.h"

#include <signal.h>
#include <sys/mman.h>

#include <cerrno>
#include <system_error>

namespace h2o::cuda::emulation {
namespace {

std::vector<Memory> watched;
volatile sig_atomic_t is_written = 0;
struct sigaction previous;

void* page_of(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) / kPageBytes * kPageBytes);
}

// Allows the write, which is then performed.
void on_fault(int, siginfo_t* info, void*) {
  for (const Memory& memory : watched) {
    const auto* const begin = reinterpret_cast<const std::byte*>(memory.data());
    const auto* const page = static_cast<const std::byte*>(page_of(info->si_addr));
    if (page < begin || page >= begin + memory.size_bytes()) continue;
    is_written = 1;
    mprotect(page_of(info->si_addr), kPageBytes, PROT_READ | PROT_WRITE);
    return;
  }
  sigaction(SIGSEGV, &previous, nullptr);  // another fault, which the instruction repeats
}

void protect(int protection) {
  for (const Memory& memory : watched) {
    const size_t bytes = (memory.size_bytes() + kPageBytes - 1) / kPageBytes * kPageBytes;
    if (mprotect(memory.data(), bytes, protection) != 0) {
      throw std::system_error(errno, std::generic_category(), "mprotect");
    }
  }
}

}  // namespace

void begin_watch(const std::vector<Memory>& memory) {
  watched = memory;
  is_written = 0;
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &previous);
  protect(PROT_READ);
}

bool end_watch() {
  protect(PROT_READ | PROT_WRITE);
  sigaction(SIGSEGV, &previous, nullptr);
  watched.clear();
  return is_written != 0;
}

}  // namespace h2o::cuda::emulation
