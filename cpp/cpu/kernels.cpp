#include "cpu/kernels.h"

#include "core/error.h"

namespace h2o {

const TypeKernels& CpuKernels::of(DType dtype) const {
  switch (dtype) {
    case DType::f32:
      return f32;
    case DType::f16:
      return f16;
    case DType::bf16:
      return bf16;
    case DType::q8_0:
      return q8_0;
  }
  throw InvalidArgument(text("[cpu] no kernels for type ", static_cast<uint32_t>(dtype)));
}

}  // namespace h2o
