// Weights in the order in which matmul reads them fastest: the blocks of kInterleaved rows are
// interleaved, so that one load gives four elements of each row. Only the order of bytes changes,
// except for types that are slower to unpack than to read: their blocks are first expanded
// (cpu/matmul/interleaved_codebooks-inl.h).
//
// For each block of kInterleaved rows: first the scale of each row, if the block size is not a
// multiple of four; then bytes 0 to 3 of the rest, of each row; then the next four; and so on.
// Missing rows in the last group are zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/tensor.h"
#include "cpu/kernels.h"

namespace h2o {

int64_t interleaved_bytes(const Tensor& rows);

// Interleaves rows kInterleaved * strip and up of `from` into `to`. unpack: converts a block of the
// file to that of `to`; nullptr if they are the same.
void interleave(const Tensor& to, const Tensor& from, int64_t strip,
                decltype(TypeKernels::unpack) unpack);

// Reads row i, row_bytes() long, in its original order.
void read_interleaved_row(std::byte* to, const Tensor& from, int64_t i);

}  // namespace h2o
