// Weights to GGUF's quantised blocks: for making files. Nothing here runs in a forward pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/dtype.h"

namespace h2o {

// The types that quantize_rows() writes.
std::vector<DType> quantizable_types();

// Writes x as blocks of `dtype`. Rows are shared out among n_threads; the bytes do not depend on
// how many there are.
//   out  [n_rows][byte_size(dtype, n_cols)]
//   x    [n_rows][n_cols], n_cols a multiple of the block size
//   importance  [n_cols] how much the squared error of a column counts, 0 or more; empty: all alike
// Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 come out as gguf-py makes them, bit for bit, whatever counts. The
// K-quants and IQ4 have no such reference: they are searched for the least squared error.
// Throws InvalidArgument for other types and sizes, for a value that is not finite, and for one
// so large that the f16 scale of its block would overflow.
void quantize_rows(DType dtype, std::byte* out, const float* x, int64_t n_rows, int64_t n_cols,
                   int n_threads, std::span<const float> importance = {});

}  // namespace h2o
