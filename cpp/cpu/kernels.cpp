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
    case DType::q4_0:
      return q4_0;
    case DType::q4_1:
      return q4_1;
    case DType::q5_0:
      return q5_0;
    case DType::q5_1:
      return q5_1;
    case DType::q8_0:
      return q8_0;
    case DType::q2_k:
      return q2_k;
    case DType::q3_k:
      return q3_k;
    case DType::q4_k:
      return q4_k;
    case DType::q5_k:
      return q5_k;
    case DType::q6_k:
      return q6_k;
    case DType::iq4_nl:
      return iq4_nl;
    case DType::iq4_xs:
      return iq4_xs;
    case DType::mxfp4:
      return mxfp4;
  }
  throw InvalidArgument(text("no kernels for type ", static_cast<uint32_t>(dtype)));
}

}  // namespace h2o
