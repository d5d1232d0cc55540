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
    case DType::iq1_s:
      return iq1_s;
    case DType::iq1_m:
      return iq1_m;
    case DType::iq2_xxs:
      return iq2_xxs;
    case DType::iq2_xs:
      return iq2_xs;
    case DType::iq2_s:
      return iq2_s;
    case DType::iq3_xxs:
      return iq3_xxs;
    case DType::iq3_s:
      return iq3_s;
    case DType::tq1_0:
      return tq1_0;
    case DType::tq2_0:
      return tq2_0;
    case DType::nvfp4:
      return nvfp4;
    case DType::q1_0:
      return q1_0;
    case DType::q2_0:
      return q2_0;
    case DType::q2:
      return q2;
    case DType::q3:
      return q3;
  }
  throw InvalidArgument(concat("no kernels for type ", static_cast<uint32_t>(dtype)));
}

CpuKernels CpuKernels::in_float() const {
  CpuKernels kernels = *this;
  for (const DType dtype : computable_dtypes()) {
    auto& type = const_cast<TypeKernels&>(kernels.of(dtype));
    type.int8_matmul = type.interleaved_matmul = nullptr;
    type.int8_group = 0;
  }
  return kernels;
}

}  // namespace h2o
