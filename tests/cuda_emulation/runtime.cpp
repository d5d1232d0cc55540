// The CUDA runtime functions that the back end uses, for one emulated device.
//
// A stream executes operations in order, but delays copies as long as possible: until a kernel
// follows, or a later event is waited for. With H2O_EMULATION_LATE=kernels it delays kernels
// instead, and copies as early as possible. Missing synchronization fails in one of the two modes.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "block.h"
#include "control.h"

struct Kernel {
  const void* function;
  bool overlaps;
  std::function<void()> run;
};
using Work = std::vector<Kernel>;

struct CUgraph_st {
  Work work;
};
struct CUgraphExec_st {
  Work work;
};
struct CUstream_st {
  struct Item {
    std::function<void()> run;
    const void* reads = nullptr;  // host memory it reads
    bool is_kernel = false;
  };
  CUgraph_st* recorded = nullptr;  // set during capture
  std::deque<Item> pending;
  h2o::cuda::emulation::Chain chain;  // of kernels that have run
  uint64_t n_asked = 0;               // operations enqueued; the last of them are pending
};
struct CUevent_st {
  CUstream_st* stream = nullptr;
  uint64_t n = 0;  // n_asked when the event was recorded
};

namespace {

constexpr size_t kMostShared = 99 << 10;  // per block, the least of all devices from 8.0 on

enum class Kind { kernel, copy };

constexpr size_t kMemory = size_t{4} << 30;

std::mutex mutex;  // guards everything below; kernels run one at a time
std::map<void*, size_t> allocated;
std::map<void*, size_t> pinned;
size_t used = 0;
size_t most_free = kMemory;
std::set<CUstream_st*> streams;

bool is_on_device(const void* data) {
  const auto after = allocated.upper_bound(const_cast<void*>(data));
  if (after == allocated.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return data < static_cast<const std::byte*>(begin) + bytes;
}

void* allocate_pages(size_t bytes) {
  using h2o::cuda::emulation::kPageBytes;
  return std::aligned_alloc(kPageBytes, (bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
}

std::vector<h2o::cuda::emulation::Launch> launches;
uint64_t bytes_read = 0;
bool skips = false;
int ptx_version = 90;
int n_graphs = 0;
std::set<h2o::cuda::emulation::Call> failing;

cudaError_t fails(h2o::cuda::emulation::Call call) {
  return failing.erase(call) > 0 ? cudaErrorUnknown : cudaSuccess;
}

Kind late() {
  static const Kind kind = [] {
    const char* name = std::getenv("H2O_EMULATION_LATE");
    return name != nullptr && name == std::string_view("kernels") ? Kind::kernel : Kind::copy;
  }();
  return kind;
}

// Executes the first n operations of the stream.
void finish(CUstream_st* stream, uint64_t n) {
  while (stream->n_asked - stream->pending.size() < n) {
    const CUstream_st::Item item = std::move(stream->pending.front());
    stream->pending.pop_front();
    if (!item.is_kernel) stream->chain.end();
    item.run();
  }
}
void finish(CUstream_st* stream) { finish(stream, stream->n_asked); }

// Ends all chains: no kernel of any stream overlaps with what follows.
void end_chains() {
  for (CUstream_st* stream : streams) stream->chain.end();
}

std::vector<h2o::cuda::emulation::Memory> device_memory() {
  std::vector<h2o::cuda::emulation::Memory> all;
  for (const auto& [data, bytes] : allocated)
    all.push_back({static_cast<uint32_t*>(data), bytes / 4});
  return all;
}

void ask(CUstream_st* stream, Kind kind, CUstream_st::Item item) {
  stream->pending.push_back(std::move(item));
  ++stream->n_asked;
  if (kind != late()) finish(stream);
}

}  // namespace

namespace h2o::cuda::emulation {

std::vector<Launch> take_launches() { return std::exchange(launches, {}); }
uint64_t take_bytes_read() { return std::exchange(bytes_read, 0); }
void skip_kernels(bool skip) { skips = skip; }
void set_ptx_version(int version) { ptx_version = version; }
int n_graphs() { return ::n_graphs; }
void fail_next(Call call) { failing.insert(call); }
void set_free_memory(size_t bytes) { most_free = bytes; }

cudaError_t launched(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                     bool overlaps) {
  const std::lock_guard lock(mutex);
  const Launch launch{kernel,
                      {grid.x, grid.y, grid.z},
                      uint64_t{block.x} * block.y * block.z,
                      shared_bytes,
                      overlaps};
  launches.push_back(launch);
  const bool fits = grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= 0x7fffffff &&
                    grid.y <= 65535 && grid.z <= 65535 && launch.threads >= 1 &&
                    launch.threads <= 1024 && shared_bytes <= kMostShared;
  return fits ? cudaSuccess : cudaErrorInvalidConfiguration;
}

void submit(cudaStream_t stream, const void* function, bool overlaps,
            std::function<void()> kernel) {
  if (stream->recorded != nullptr) {
    stream->recorded->work.push_back({function, overlaps, std::move(kernel)});
    return;
  }
  const auto run = [stream, function, overlaps, kernel = std::move(kernel), skipped = skips] {
    if (skipped) return;
    chain = overlaps ? &stream->chain : nullptr;
    if (overlaps) {
      chain->begin_kernel(function, device_memory());
    } else {
      stream->chain.end();
    }
    kernel();
  };
  const std::lock_guard lock(mutex);
  ask(stream, Kind::kernel, {.run = run, .is_kernel = true});
}

void run_chain(const std::vector<std::function<void()>>& kernels) {
  Chain::check_next();
  const std::unique_ptr<CUstream_st, void (*)(CUstream_st*)> stream(
      [] {
        cudaStream_t made = nullptr;
        cudaStreamCreateWithFlags(&made, 0);
        return made;
      }(),
      [](CUstream_st* made) { cudaStreamDestroy(made); });
  for (const auto& kernel : kernels) {
    submit(stream.get(), nullptr, true, [=] { run_blocks(1, 32, 0, kernel); });
  }
  cudaStreamSynchronize(stream.get());
}

}  // namespace h2o::cuda::emulation

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorUnknown:
      return "unknown error";
    default:
      return "invalid value";
  }
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor         ? 9
           : attribute == cudaDevAttrComputeCapabilityMinor       ? 0
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? static_cast<int>(kMostShared)
                                                                  : 4;  // multiprocessors
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = ptx_version;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "emulated");
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard lock(mutex);
  *total = kMemory;
  *free = std::min(most_free, kMemory - used);
  return fails(h2o::cuda::emulation::Call::memory_info);
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  const std::lock_guard lock(mutex);
  *data = bytes > kMemory - used ? nullptr : allocate_pages(bytes);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*data, 0xff, bytes);  // NaN: memory must not be assumed to be zero
  allocated[*data] = bytes;
  end_chains();  // not required on a device, but this memory is not part of any chain
  used += bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  const std::lock_guard lock(mutex);
  const auto entry = allocated.find(data);
  if (entry == allocated.end()) return cudaErrorInvalidValue;
  for (CUstream_st* stream : streams) finish(stream);  // as a device does
  end_chains();
  used -= entry->second;
  allocated.erase(entry);
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** data, size_t bytes) {
  *data = std::malloc(bytes);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  const std::lock_guard lock(mutex);
  pinned[*data] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  const std::lock_guard lock(mutex);
  const void* const end = static_cast<std::byte*>(data) + pinned[data];
  for (const CUstream_st* stream : streams) {
    if (std::ranges::any_of(stream->pending, [&](const CUstream_st::Item& item) {
          return data <= item.reads && item.reads < end;
        })) {
      std::fputs("cudaFreeHost: a copy may still read this\n", stderr);
      std::abort();
    }
  }
  pinned.erase(data);
  std::free(data);
  return cudaSuccess;
}

// Not allowed during capture: the device would repeat the copy with every replay. Behavior is
// undefined if `kind` is wrong.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (stream->recorded != nullptr) return cudaErrorStreamCaptureUnsupported;
  const std::lock_guard lock(mutex);
  const bool to_device = is_on_device(to), from_device = is_on_device(from);
  if (kind == cudaMemcpyHostToDevice && (!to_device || from_device)) return cudaErrorInvalidValue;
  if (kind == cudaMemcpyDeviceToHost && (to_device || !from_device)) return cudaErrorInvalidValue;
  if (from_device && !to_device) bytes_read += bytes;
  ask(stream, Kind::copy, {[=] { std::memcpy(to, from, bytes); }, from_device ? nullptr : from});
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  if (stream->recorded != nullptr) return cudaErrorStreamCaptureUnsupported;
  const std::lock_guard lock(mutex);
  ask(stream, Kind::kernel, {[=] { std::memset(data, value, bytes); }});
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  const std::lock_guard lock(mutex);
  streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  finish(stream);
  streams.erase(stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream->recorded != nullptr) return cudaErrorStreamCaptureUnsupported;
  const std::lock_guard lock(mutex);
  finish(stream);
  stream->chain.end();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (stream->recorded != nullptr) return cudaErrorStreamCaptureUnsupported;
  if (event->stream == nullptr) return cudaSuccess;  // never recorded
  const std::lock_guard lock(mutex);
  // In stream order, possibly late, with the event's current state.
  ask(stream, late(), {[awaited = *event] { finish(awaited.stream, awaited.n); }});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (stream->recorded != nullptr) return cudaErrorStreamCaptureUnsupported;
  const std::lock_guard lock(mutex);
  *event = {stream, stream->n_asked};
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const std::lock_guard lock(mutex);
  if (event->stream != nullptr) finish(event->stream, event->n);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream->recorded = new CUgraph_st;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = std::exchange(stream->recorded, nullptr);
  const cudaError_t error = fails(h2o::cuda::emulation::Call::end_capture);
  if (error != cudaSuccess) delete std::exchange(*graph, nullptr);
  return error;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  const cudaError_t error = fails(h2o::cuda::emulation::Call::instantiate);
  if (error != cudaSuccess) return error;
  *exec = new CUgraphExec_st{graph->work};
  ++n_graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  --n_graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  const cudaError_t error = fails(h2o::cuda::emulation::Call::replay);
  if (error != cudaSuccess) return error;
  for (const auto& [function, overlaps, run] : exec->work) {
    h2o::cuda::emulation::submit(stream, function, overlaps, run);
  }
  return cudaSuccess;
}

}  // extern "C"
