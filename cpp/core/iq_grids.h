// The codebooks of GGUF's 1- to 3-bit types: an entry has eight or four elements, one per byte,
// lowest byte first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h2o {

// A C array, because functions of std::array could be compiled for one instruction set
// (cpu/kernels-inl.h).
template <class Entry, size_t kSize>
struct Codebook {
  Entry entries[kSize];

  constexpr const Entry& operator[](size_t i) const { return entries[i]; }
};

extern const Codebook<uint64_t, 2048> kIq1Grid;  // 9 + 8 g, where g is -1, 0 or 1
extern const Codebook<uint64_t, 256> kIq2XxsGrid;
extern const Codebook<uint64_t, 512> kIq2XsGrid;
extern const Codebook<uint64_t, 1024> kIq2SGrid;
extern const Codebook<uint32_t, 256> kIq3XxsGrid;
extern const Codebook<uint32_t, 512> kIq3SGrid;

}  // namespace h2o
