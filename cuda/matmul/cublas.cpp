#include "cuda/matmul/cublas.h"

#include <dlfcn.h>
#include <library_types.h>

#include <array>
#include <memory>
#include <utility>

#include "core/error.h"

namespace h2o::cuda {
namespace {

// The declarations of cublas_v2.h used here; the same in versions 12 and 13.
using Status = int;
constexpr Status kAllocationFailed = 3;
constexpr int kAsIs = 0, kTransposed = 1;  // cublasOperation_t
constexpr int kSumsF32 = 68;               // cublasComputeType_t: without TF32
constexpr int kAnyAlgorithm = -1;          // cublasGemmAlgo_t
// Those of cublasLt.h: cublasLtMatmulDescAttributes_t and cublasLtEpilogue_t.
constexpr int kTransposeA = 3, kEpilogue = 7, kBiasPointer = 8;
constexpr int kAddBias = 4;

constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what cuBLAS recommends for Hopper

struct Library {
  Status (*create)(void** handle);
  Status (*destroy)(void* handle);
  Status (*set_stream)(void* handle, cudaStream_t stream);
  Status (*set_workspace)(void* handle, void* workspace, size_t bytes);
  Status (*get_property)(libraryPropertyType which, int* value);
  const char* (*status_string)(Status status);
  Status (*gemm)(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha,
                 const void* a, cudaDataType type_a, int lda, const void* b, cudaDataType type_b,
                 int ldb, const void* beta, void* c, cudaDataType type_c, int ldc, int compute,
                 int algorithm);

  // These are cuBLASLt's, which cuBLAS is linked with: all or none. It takes a handle of cuBLAS.
  Status (*create_product)(void** product, int compute, cudaDataType type_scale);
  Status (*set_product)(void* product, int attribute, const void* value, size_t bytes);
  Status (*destroy_product)(void* product);
  Status (*create_layout)(void** layout, cudaDataType type, uint64_t rows, uint64_t cols,
                          int64_t stride);
  Status (*destroy_layout)(void* layout);
  Status (*matmul)(void* handle, void* product, const void* alpha, const void* a, void* layout_a,
                   const void* b, void* layout_b, const void* beta, const void* c, void* layout_c,
                   void* d, void* layout_d, const void* algorithm, void* workspace, size_t bytes,
                   cudaStream_t stream);
};

// Searches the system's paths and, if this code is in a Python package, NVIDIA's Python packages
// beside it.
void* open_library() {
  std::string packages;
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&open_library), &self) != 0 && self.dli_fname != nullptr) {
    const std::string file = self.dli_fname;
    const size_t slash = file.rfind('/');
    if (slash != std::string::npos) packages = file.substr(0, slash) + "/../nvidia/";
  }
  const std::array<std::string, 4> paths = {"libcublas.so.13", "libcublas.so.12",
                                            packages + "cu13/lib/libcublas.so.13",
                                            packages + "cublas/lib/libcublas.so.12"};
  for (const std::string& path : paths) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

// nullptr if not found. Never unloaded: it holds device state that outlives a handle.
const Library* library() {
  static const auto found = []() -> Library {
    Library l{};
    void* const file = open_library();
    const bool complete = file != nullptr && find(file, "cublasCreate_v2", l.create) &&
                          find(file, "cublasDestroy_v2", l.destroy) &&
                          find(file, "cublasSetStream_v2", l.set_stream) &&
                          find(file, "cublasSetWorkspace_v2", l.set_workspace) &&
                          find(file, "cublasGetProperty", l.get_property) &&
                          find(file, "cublasGetStatusString", l.status_string) &&
                          find(file, "cublasGemmEx", l.gemm);
    if (!complete) return {};
    const bool biases = find(file, "cublasLtMatmulDescCreate", l.create_product) &&
                        find(file, "cublasLtMatmulDescSetAttribute", l.set_product) &&
                        find(file, "cublasLtMatmulDescDestroy", l.destroy_product) &&
                        find(file, "cublasLtMatrixLayoutCreate", l.create_layout) &&
                        find(file, "cublasLtMatrixLayoutDestroy", l.destroy_layout) &&
                        find(file, "cublasLtMatmul", l.matmul);
    if (!biases) l.matmul = nullptr;
    return l;
  }();
  return found.gemm != nullptr ? &found : nullptr;
}

void check_status(Status status, const char* operation) {
  if (status == 0) return;
  const std::string message =
      concat("[cuda] cuBLAS: ", operation, ": ", library()->status_string(status));
  if (status == kAllocationFailed) throw OutOfMemory(message);
  throw DeviceError(message);
}

cudaDataType data_type(DType dtype) {
  return dtype == DType::f16 ? CUDA_R_16F : dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

}  // namespace

Cublas::Cublas(const Stream& stream) : stream_(stream) {
  if (library() == nullptr) return;
  workspace_ = allocate_device(kWorkspaceBytes);
  Status status = library()->create(&handle_);
  if (status == 0) status = library()->set_stream(handle_, stream.get());
  if (status == 0) {
    status = library()->set_workspace(handle_, workspace_.data(), workspace_.size());
  }
  if (status == 0) return;
  problem_ = concat(": ", library()->status_string(status));
  if (handle_ != nullptr) library()->destroy(std::exchange(handle_, nullptr));
}

Cublas::~Cublas() {
  if (handle_ != nullptr) library()->destroy(handle_);
}

std::string Cublas::name() const {
  if (handle_ == nullptr) return "no cuBLAS" + problem_;
  int major = 0;
  int minor = 0;
  library()->get_property(MAJOR_VERSION, &major);
  library()->get_property(MINOR_VERSION, &minor);
  return concat("cuBLAS ", major, ".", minor);
}

void Cublas::multiply(float* y, int64_t y_stride, const void* x, const void* w, DType dtype,
                      int64_t n_rows, int64_t n_out, int64_t n_in, bool add) const {
  // cuBLAS is column-major: it computes y^T = w x^T.
  const float alpha = 1;
  const float beta = add ? 1 : 0;
  const cudaDataType type = data_type(dtype);
  check_status(library()->gemm(handle_, kTransposed, kAsIs, static_cast<int>(n_out),
                               static_cast<int>(n_rows), static_cast<int>(n_in), &alpha, w, type,
                               static_cast<int>(n_in), x, type, static_cast<int>(n_in), &beta, y,
                               CUDA_R_32F, static_cast<int>(y_stride), kSumsF32, kAnyAlgorithm),
               "multiply");
}

bool Cublas::multiply_biased(float* y, int64_t y_stride, const void* x, const void* w, DType dtype,
                             int64_t n_rows, int64_t n_out, int64_t n_in, const float* bias,
                             bool add) const {
  const Library& l = *library();
  if (l.matmul == nullptr || reinterpret_cast<uintptr_t>(bias) % 16 != 0) return false;
  using Owned = std::unique_ptr<void, Status (*)(void*)>;
  const auto layout = [&](cudaDataType type, int64_t rows, int64_t cols, int64_t stride) {
    void* made = nullptr;
    check_status(l.create_layout(&made, type, rows, cols, stride), "describe a matrix");
    return Owned(made, l.destroy_layout);
  };
  const auto of_w = layout(data_type(dtype), n_in, n_out, n_in);
  const auto of_x = layout(data_type(dtype), n_in, n_rows, n_in);
  const auto of_y = layout(CUDA_R_32F, n_out, n_rows, y_stride);
  void* made = nullptr;
  check_status(l.create_product(&made, kSumsF32, CUDA_R_32F), "describe a product");
  const Owned product(made, l.destroy_product);
  const auto set = [&](int attribute, const auto& value) {
    check_status(l.set_product(product.get(), attribute, &value, sizeof(value)),
                 "describe a product");
  };
  set(kTransposeA, kTransposed);
  set(kEpilogue, kAddBias);
  set(kBiasPointer, bias);
  const float alpha = 1;
  const float beta = add ? 1 : 0;
  return l.matmul(handle_, product.get(), &alpha, w, of_w.get(), x, of_x.get(), &beta, y,
                  of_y.get(), y, of_y.get(), nullptr, workspace_.data(), workspace_.size(),
                  stream_.get()) == 0;
}

}  // namespace h2o::cuda
