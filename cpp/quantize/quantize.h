// Quantizes weights to GGUF blocks, for writing files. Not used in forward passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/dtype.h"

namespace h2o {

// The types that quantize_rows() supports.
std::vector<DType> quantizable_types();

// Writes x as blocks of `dtype`. Rows are divided among n_threads; the result does not depend on
// their number.
//   out  [n_rows][byte_size(dtype, n_cols)]
//   x    [n_rows][n_cols], n_cols a multiple of the block size
//   importance  [n_cols] weight of a column's squared error, 0 or more; empty: all equal
// Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 are bit-identical to gguf-py, whatever the importance. The
// K-quants and IQ4 have no such reference: they minimize the squared error.
// Throws InvalidArgument for unsupported types and sizes, for a value that is not finite, and for
// one so large that its block's f16 scale would overflow.
void quantize_rows(DType dtype, std::byte* out, const float* x, int64_t n_rows, int64_t n_cols,
                   int n_threads, std::span<const float> importance = {});

}  // namespace h2o
