// The functions of cuBLAS that the back end uses, as a library for it to find, with matrices in the
// emulated device's memory. H2O_EMULATION_CUBLAS=fails: it cannot start.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <library_types.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace {

float element(const void* x, cudaDataType type, int64_t i) {
  switch (type) {
    case CUDA_R_16F:
      return __half2float(static_cast<const __half*>(x)[i]);
    case CUDA_R_16BF:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[i]);
    default:
      return static_cast<const float*>(x)[i];
  }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int cublasCreate_v2(void** handle) {
  const char* setting = std::getenv("H2O_EMULATION_CUBLAS");
  if (setting != nullptr && setting == std::string_view("fails")) return 1;
  *handle = new int;
  return 0;
}

EXPORTED int cublasDestroy_v2(void* handle) {
  delete static_cast<int*>(handle);
  return 0;
}

EXPORTED int cublasSetStream_v2(void*, void*) { return 0; }

EXPORTED int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }

EXPORTED int cublasGetProperty(libraryPropertyType which, int* value) {
  *value = which == MAJOR_VERSION ? 13 : 0;
  return 0;
}

EXPORTED const char* cublasGetStatusString(int status) {
  return status == 1 ? "not initialized" : "another status";
}

// c [n, ldc] = alpha b a^T + beta c, with a [m, lda] and b [n, ldb]; only as the back end calls it.
EXPORTED int cublasGemmEx(void*, int op_a, int op_b, int m, int n, int k, const void* alpha,
                          const void* a, cudaDataType type_a, int lda, const void* b,
                          cudaDataType type_b, int ldb, const void* beta, void* c,
                          cudaDataType type_c, int ldc, int, int) {
  if (op_a != 1 || op_b != 0 || type_c != CUDA_R_32F) return 7;
  const float scale = *static_cast<const float*>(beta);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t out = 0; out < m; ++out) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        sum += element(a, type_a, out * lda + i) * element(b, type_b, row * ldb + i);
      }
      float& y = static_cast<float*>(c)[row * ldc + out];
      y = *static_cast<const float*>(alpha) * sum + (scale == 0 ? 0 : scale * y);
    }
  }
  return 0;
}
