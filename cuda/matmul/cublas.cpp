#include "cuda/matmul/cublas.h"

#include <dlfcn.h>
#include <library_types.h>

#include <array>
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
    return complete ? l : Library{};
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

Cublas::Cublas(const Stream& stream) {
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

}  // namespace h2o::cuda
