#include "cuda/runtime/device.h"

#include <cstdlib>
#include <string_view>

#include "core/error.h"

namespace h2o::cuda {

void check(cudaError_t error, const char* operation) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clear an error that is not sticky, so that it is not reported again
  const std::string message = concat("[cuda] ", operation, ": ", describe(error));
  if (error == cudaErrorMemoryAllocation) throw OutOfMemory(message);
  throw DeviceError(message);
}

std::string describe(cudaError_t error) {
  const char* const said = cudaGetErrorString(error);
  switch (error) {
    case cudaErrorInsufficientDriver: {
      int driver = 0;
      cudaDriverGetVersion(&driver);
      if (driver == 0) return "no NVIDIA driver is installed";
      return concat("the driver knows CUDA ", driver / 1000, ".", driver % 1000 / 10,
                    ", this build needs ", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10);
    }
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoKernelImageForDevice:
      return concat(said, ": this build has no kernels for this GPU");
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorECCUncorrectable:
      return concat(said, "; this process can no longer use the device");
    default:
      return said;
  }
}

bool is_switched_on(const char* variable) {
  const char* const value = std::getenv(variable);
  return value == nullptr || std::string_view(value) != "0";
}

Buffer allocate_device(size_t bytes) {
  if (bytes == 0) return {};
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw OutOfMemory(concat("[cuda] cannot allocate ", bytes, " bytes on the device: ", free,
                             " of ", total, " are free"));
  }
  check(error, "allocate");
  return {data, bytes, [](void* p, void*) noexcept { cudaFree(p); }};
}

Buffer allocate_pinned(size_t bytes) {
  if (bytes == 0) return {};
  void* data = nullptr;
  const cudaError_t error = cudaMallocHost(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw OutOfMemory(concat("[cuda] cannot pin ", bytes, " bytes of the host's memory"));
  }
  check(error, "allocate on the host");
  return {data, bytes, [](void* p, void*) noexcept { cudaFreeHost(p); }};
}

Stream::Stream(int device) : device_(device) {
  check(cudaSetDevice(device), "choose the device");
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device");
  if (major < 8) {
    throw InvalidArgument(concat("[cuda] device ", device, " has compute capability ", major, ".",
                                 minor, ", needed is 8.0 or later"));
  }
  check(cudaDeviceGetAttribute(&n_multiprocessors_, cudaDevAttrMultiProcessorCount, device),
        "device");
  const bool waits = kernels_can_overlap();
  can_overlap_ = major >= 9 && waits && is_switched_on("H2O_CUDA_OVERLAP");
  // Back ends of one process, without the default stream, do not wait for each other.
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream");
}

Stream::~Stream() { cudaStreamDestroy(stream_); }

void Stream::synchronize() const { check(cudaStreamSynchronize(stream_), "wait for the device"); }

}  // namespace h2o::cuda
