// The entry point that libFuzzer calls.
#include "target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return fuzz({reinterpret_cast<const std::byte*>(data), size});
}
