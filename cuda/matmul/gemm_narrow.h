// Products of tens of rows with quantized weights on tensor cores, without unpacking the weights to
// memory.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/matmul/matvec.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// Does gemm_narrow() support this type? Quantized types, except for MXFP4, whose scales may exceed
// f16.
bool gemm_narrow_takes(DType dtype);

// Products of the same x in one launch: their weights have the same type and the same number of
// columns. y [n_rows, w.rows] = x w^T + bias, or y += it. x [n_rows, w.cols] in f16, in memory that
// can be read some columns further. Weights are rounded to f16, those with a
// minimum after rounding that, and one beyond f16's range is infinite; sums are f32.
// workspace: gemm_narrow_workspace() bytes, zeros before the first call.
void gemm_narrow(const Stream& stream, std::span<const DeviceProduct> products, const void* x,
                 int64_t n_rows, bool add, std::byte* workspace);
size_t gemm_narrow_workspace(const Stream& stream);

}  // namespace h2o::cuda
