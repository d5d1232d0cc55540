// Lookup tables for unpacking blocks.
#pragma once

#include "core/blocks.h"
#include "core/iq_grids.h"

namespace h2o {

// Indexed by sign bits. Byte i of an entry is 0xff if bit i of the index is set, else 0. For 7-bit
// indices the eighth sign is the parity of the others.
extern const Codebook<uint64_t, 256> kSigns;
extern const Codebook<uint64_t, 128> kEvenSigns;

// NVFP4's scales: four exponent bits, three fraction bits, no sign; halved, because the values are
// doubled.
extern const Codebook<F16, 256> kNvfp4Scales;

}  // namespace h2o
