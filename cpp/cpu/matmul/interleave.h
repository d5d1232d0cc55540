// Weights in the order in which matmul reads them fastest: the blocks of kInterleaved rows side by
// side, so that one load gives four elements of each row. Only the order of bytes differs, but for
// types that take longer to unpack than to read: their blocks are unpacked first, to blocks of more
// bytes (cpu/matmul/interleaved_codebooks-inl.h).
//
// Of each block of kInterleaved rows in turn: the scale that makes the size of a block no multiple
// of four, of each row, if there is one; then the first four bytes of what is left, of each row;
// then the next four; and so on. Rows that are missing in the last kInterleaved are zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/tensor.h"
#include "cpu/kernels.h"

namespace h2o {

int64_t interleaved_bytes(const Tensor& rows);

// Rows kInterleaved * strip and following of `from` to where `to`, interleaved, has them.
// unpack: what turns a block of the file into that of `to`, or nullptr if they are the same.
void interleave(const Tensor& to, const Tensor& from, int64_t strip,
                decltype(TypeKernels::unpack) unpack);

// Row i of what was interleaved, as it was before: row_bytes() of it.
void read_interleaved_row(std::byte* to, const Tensor& from, int64_t i);

}  // namespace h2o
