// Dot products with the AVX-512 VNNI instruction.
#pragma once

#include "cpu/simd/vec_avx512.h"

namespace h2o {
namespace {

Ints dot(Ints sums, Ints w, Ints x) { return {_mm512_dpbusd_epi32(sums.v, w.v, x.v)}; }

}  // namespace
}  // namespace h2o

// After the instruction it is written against:
#include "cpu/matmul/dot_vnni-inl.h"
