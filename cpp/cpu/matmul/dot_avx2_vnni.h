// Dot products with the instruction of AVX-VNNI.
#pragma once

#include "cpu/simd/vec_avx2.h"

namespace h2o {
namespace {

Ints dot(Ints sums, Ints w, Ints x) { return {_mm256_dpbusd_avx_epi32(sums.v, w.v, x.v)}; }

}  // namespace
}  // namespace h2o

// After the instruction it is written against:
#include "cpu/matmul/dot_vnni-inl.h"
