// The functions of cuBLAS that the back end uses, as a library for it to find, with matrices in the
// emulated device's memory. H2O_EMULATION_CUBLAS=fails: it cannot start.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <driver_types.h>
#include <library_types.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
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

// d [n, ldd] = alpha b a^T + beta c + bias, with a [m, lda] and b [n, ldb]; only as the back end
// calls it.
static int multiply(int m, int n, int k, const void* alpha, const void* a, cudaDataType type_a,
                    int64_t lda, const void* b, cudaDataType type_b, int64_t ldb, const void* beta,
                    const void* c, void* d, cudaDataType type_d, int64_t ldd, const float* bias) {
  if (type_d != CUDA_R_32F) return 7;
  const float scale = *static_cast<const float*>(beta);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t out = 0; out < m; ++out) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        sum += element(a, type_a, out * lda + i) * element(b, type_b, row * ldb + i);
      }
      const int64_t at = row * ldd + out;
      const float before = scale == 0 ? 0 : scale * static_cast<const float*>(c)[at];
      static_cast<float*>(d)[at] =
          *static_cast<const float*>(alpha) * sum + before + (bias != nullptr ? bias[out] : 0);
    }
  }
  return 0;
}

EXPORTED int cublasGemmEx(void*, int op_a, int op_b, int m, int n, int k, const void* alpha,
                          const void* a, cudaDataType type_a, int lda, const void* b,
                          cudaDataType type_b, int ldb, const void* beta, void* c,
                          cudaDataType type_c, int ldc, int, int) {
  if (op_a != 1 || op_b != 0) return 7;
  return multiply(m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c, c, type_c, ldc, nullptr);
}

// cuBLASLt's.
struct Layout {
  cudaDataType type;
  uint64_t rows, cols;
  int64_t stride;
};

struct Described {
  int transpose_a = 0, epilogue = 1;
  const float* bias = nullptr;
};

EXPORTED int cublasLtMatmulDescCreate(void** product, int, cudaDataType) {
  *product = new Described;
  return 0;
}
EXPORTED int cublasLtMatmulDescDestroy(void* product) {
  delete static_cast<Described*>(product);
  return 0;
}
EXPORTED int cublasLtMatmulDescSetAttribute(void* product, int attribute, const void* value,
                                            size_t bytes) {
  auto* const to = static_cast<Described*>(product);
  void* const place = attribute == 3   ? static_cast<void*>(&to->transpose_a)
                      : attribute == 7 ? static_cast<void*>(&to->epilogue)
                      : attribute == 8 ? static_cast<void*>(&to->bias)
                                       : nullptr;
  if (place == nullptr || bytes != (attribute == 8 ? sizeof(void*) : sizeof(int))) return 7;
  std::memcpy(place, value, bytes);
  return 0;
}
EXPORTED int cublasLtMatrixLayoutCreate(void** layout, cudaDataType type, uint64_t rows,
                                        uint64_t cols, int64_t stride) {
  *layout = new Layout{type, rows, cols, stride};
  return 0;
}
EXPORTED int cublasLtMatrixLayoutDestroy(void* layout) {
  delete static_cast<Layout*>(layout);
  return 0;
}
EXPORTED int cublasLtMatmul(void*, void* product, const void* alpha, const void* a, void* layout_a,
                            const void* b, void* layout_b, const void* beta, const void* c, void*,
                            void* d, void* layout_d, const void*, void*, size_t, cudaStream_t) {
  const auto& of = *static_cast<const Described*>(product);
  const auto &at_a = *static_cast<const Layout*>(layout_a),
             &at_b = *static_cast<const Layout*>(layout_b),
             &at_d = *static_cast<const Layout*>(layout_d);
  if (of.transpose_a != 1 || of.epilogue != 4 || at_a.rows != at_b.rows || at_a.cols != at_d.rows ||
      at_b.cols != at_d.cols) {
    return 7;
  }
  return multiply(static_cast<int>(at_d.rows), static_cast<int>(at_d.cols),
                  static_cast<int>(at_a.rows), alpha, a, at_a.type, at_a.stride, b, at_b.type,
                  at_b.stride, beta, c, d, at_d.type, at_d.stride, of.bias);
}
