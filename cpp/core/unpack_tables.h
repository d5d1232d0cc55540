// What is faster read from a table when blocks are unpacked.
#pragma once

#include "core/blocks.h"
#include "core/iq_grids.h"

namespace h2o {

// Of eight signs, a bit each, the bytes of those that are set have all bits. Of seven signs the
// eighth makes the number of those that are set even.
extern const Codebook<uint64_t, 256> kSigns;
extern const Codebook<uint64_t, 128> kEvenSigns;

// NVFP4's scales: four bits of exponent, three of fraction, no sign; halved, for the values are
// doubled.
extern const Codebook<F16, 256> kNvfp4Scales;

}  // namespace h2o
