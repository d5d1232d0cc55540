#include "cuda/cuda_backend.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "cuda/attention/attend.h"
#include "cuda/attention/drafts.h"
#include "cuda/attention/recall.h"
#include "cuda/matmul/matmul.h"
#include "cuda/matmul/matvec.h"
#include "cuda/matmul/repack.h"
#include "cuda/operations.h"
#include "cuda/runtime/captured_graph.h"
#include "cuda/runtime/copy_async.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"

namespace h2o {
namespace {

using cuda::check;

constexpr size_t kStagedBytes = 64 << 10;

struct DeviceMemory {
  size_t free, total;
};

// Memory of the current device.
DeviceMemory device_memory() {
  DeviceMemory memory{};
  check(cudaMemGetInfo(&memory.free, &memory.total), "memory");
  return memory;
}

void check_device(int device) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw InvalidArgument(concat("[cuda] no device can be used: ", cuda::describe(error)));
  }
  require(device >= 0 && device < count, "[cuda] device ", device, ", this machine has ", count);
}

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int device)
      : stream_(device),
        copies_(stream_),
        batches_(stream_),
        matmul_(stream_),
        staged_(cuda::allocate_pinned(kStagedBytes)) {}

  ~CudaBackend() override {
    cudaSetDevice(stream_.device());
    // copies from a pinned batch, which is freed next, may be in progress
    cudaStreamSynchronize(stream_.get());
  }

  std::string name() const override {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, stream_.device()), "device");
    const std::string reason = graphs_.reason();
    return concat("cuda (", properties.name, ", ", matmul_.name(),
                  stream_.can_overlap() ? "" : ", launches do not overlap",
                  reason.empty() ? "" : ", no graphs: " + reason, ")");
  }

  const Capabilities& capabilities() const override {
    static const Capabilities capabilities{
        .kv_dtypes = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0, DType::q3,
                      DType::q2},
        .max_head_dim = cuda::kMaxHeadDim,
        .largest_logits = true,
        .archives = true,
        .draft_rows = cuda::kMatvecRows,
        .copied_summaries = true,
        .n_batch = kCudaRows,
    };
    return capabilities;
  }

  Buffer allocate(size_t bytes) override {
    use_device();
    Buffer buffer = cuda::allocate_device(bytes);
    if (bytes > 0) {
      check(cudaMemsetAsync(buffer.data(), 0, bytes, stream_.get()), "allocate");
      stream_.synchronize();
    }
    return buffer;
  }

  Buffer allocate_host(size_t bytes) override {
    use_device();
    Buffer buffer = cuda::allocate_pinned(bytes);
    if (bytes > 0) std::memset(buffer.data(), 0, bytes);
    return buffer;
  }

  bool expect_weights(size_t bytes) override {
    use_device();
    const auto [free, total] = device_memory();
    if (bytes > free) {
      throw OutOfMemory(concat("[cuda] the weights take ", bytes, " bytes, ", free,
                               " of the device's ", total, " are free"));
    }
    return true;
  }

  size_t upload_bytes(const Tensor& host) const override {
    return static_cast<size_t>(host.rows * cuda::device_row_bytes(host.dtype, host.cols));
  }

  Tensor upload(const Tensor& host, std::byte* to) override {
    use_device();
    return matmul_.upload(host, to);
  }

  void read(void* host, const void* device, size_t bytes) override {
    if (bytes == 0 || bytes > kStagedBytes)
      return copy(host, device, bytes, cudaMemcpyDeviceToHost);
    copy(staged_.data(), device, bytes, cudaMemcpyDeviceToHost);
    std::memcpy(host, staged_.data(), bytes);
  }

  void write(void* device, const void* host, size_t bytes) override {
    copy(device, host, bytes, cudaMemcpyHostToDevice);
  }

  void copy_async(std::span<const HostCopy> copies) override {
    use_device();
    copies_.begin(copies);
  }

  void await_copies() override {
    use_device();
    copies_.await();
  }

  void finish() override {
    use_device();
    stream_.synchronize();
  }

  void run(const Batch& batch, const std::function<void()>& pass) override {
    begin(batch);
    pass();
  }

  void run(const Batch& batch, std::unique_ptr<CapturedGraph>& graph,
           const std::function<void()>& pass) override {
    begin(batch);
    const bool decodes = std::all_of(batch.segments.begin(), batch.segments.end(),
                                     [](const Segment& segment) { return segment.n_rows == 1; });
    if (!decodes) return pass();
    if (graph == nullptr) graph = std::make_unique<cuda::GraphCache>();
    const cuda::DecodeKinds kinds(batch.segments);
    const cuda::StepKind step{batch.n_rows(), kinds.fixed, kinds.rolling, kinds.in_use,
                              batch.turns};
    static_cast<cuda::GraphCache&>(*graph).run(stream_, graphs_, step, pass);
  }

  void embed(Tensor x, const Tensor& table, const Batch&) override {
    matmul_.embed(x, table, batch_.tokens);
  }

  void add_positions(Tensor x, const Tensor& table, const Batch&) override {
    cuda::add_positions(stream_, x, table, batch_.positions);
  }

  void scale_by_position(Tensor x, float scale, int32_t length, int32_t offset,
                         const Batch&) override {
    cuda::scale_by_position(stream_, x, scale, length, offset, batch_.positions);
  }

  void rotate(Tensor q, Tensor k, int64_t head_dim, const Rope& rope, const Batch&) override {
    cuda::rotate(stream_, q, k, head_dim, rope, batch_.positions);
  }

  void clamp(Tensor x, float limit) override { cuda::clamp(stream_, x, limit); }

  void layer_norm(Tensor y, const Tensor& x, const Affine& norm, float eps) override {
    cuda::layer_norm(stream_, y, x, norm, eps, matmul_.operands(y));
  }

  void rms_norm(Tensor y, const Tensor& x, const Tensor& weight, float eps) override {
    cuda::rms_norm(stream_, y, x, weight, eps, matmul_.operands(y));
  }

  void matmul(std::initializer_list<Product> products, const Tensor& x) override {
    matmul_.multiply(products, x, false);
  }

  void matmul_add(Tensor y, const Tensor& x, const Affine& w) override {
    const Product product{y, w};
    matmul_.multiply({&product, 1}, x, true);
  }

  void relu(Tensor x) override { cuda::relu(stream_, x, matmul_.operands(x)); }

  void relu_squared(Tensor x) override { cuda::relu_squared(stream_, x, matmul_.operands(x)); }

  void gelu_tanh(Tensor x) override { cuda::gelu_tanh(stream_, x, matmul_.operands(x)); }

  void gelu_erf(Tensor x) override { cuda::gelu_erf(stream_, x, matmul_.operands(x)); }

  void xielu(Tensor x, const Xielu& f) override { cuda::xielu(stream_, x, f, matmul_.operands(x)); }

  void apply_gate(Gate kind, Tensor up, const Tensor& gate) override {
    cuda::apply_gate(stream_, kind, up, gate, matmul_.operands(up));
  }

  void matmul_gated(Gate kind, const Product& up, const Product& gate, const Tensor& x) override {
    if (!matmul_.multiply_gated(kind, up, gate, x)) Backend::matmul_gated(kind, up, gate, x);
  }

  void split_blocks(Tensor a, Tensor b, const Tensor& x, int64_t width) override {
    cuda::split_blocks(stream_, a, b, x, width);
  }

  void copy_heads(const Heads& to, const Heads& from, int64_t n_rows, int64_t n_heads,
                  int64_t width) override {
    cuda::copy_heads(stream_, to, from, n_rows, n_heads, width);
  }

  void add(Tensor y, const Tensor& x) override { cuda::add(stream_, y, x); }

  void scale(Tensor x, float factor) override { cuda::scale(stream_, x, factor); }

  void softcap(Tensor x, float cap) override { cuda::softcap(stream_, x, cap); }

  void route(const Routes& routes, Tensor logits, const Tensor& bias) override {
    cuda::route(stream_, routes, logits, bias);
  }

  void dispatch(Tensor y, const Tensor& x, const Routes& routes) override {
    cuda::dispatch(stream_, y, x, routes, matmul_.operands(y));
  }

  void matmul_experts(std::initializer_list<Product> products, const Tensor& x,
                      const Routes& routes) override {
    matmul_.multiply_experts(products, x, routes);
  }

  void combine_add(Tensor y, const Tensor& x, const Routes& routes) override {
    cuda::combine_add(stream_, y, x, routes);
  }

  void gate_rows(Tensor x, const Tensor& gate) override {
    cuda::gate_rows(stream_, x, gate, matmul_.operands(x));
  }

  void gather(Tensor y, const Tensor& x, const Batch&) override {
    cuda::gather(stream_, y, x, batch_.logits_rows);
  }

  void argmax(int32_t* tokens, const Tensor& x) override { cuda::argmax(stream_, tokens, x); }

  void select_largest(LargestLogits* largest, const Tensor& x, const Batch&) override {
    cuda::select_largest(stream_, largest, x, batch_.temperatures);
  }

  size_t attend_workspace(const KvView& shape) const override {
    return cuda::recall_workspace(shape) +
           std::max({cuda::decode_workspace(shape), cuda::prefill_workspace(shape),
                     cuda::admit_workspace(shape)});
  }

  void attend(const Attention& attention, const KvView& all, const Batch& batch) override {
    // Tokens outside a window are not archived.
    const bool archives = all.archive != nullptr && attention.window == 0;
    std::byte* const recalls = archives ? all.workspace : nullptr;
    KvView cache = all;
    cache.workspace += cuda::recall_workspace(all);
    const cuda::DecodeKinds kinds(batch.segments);  // of all turns, as of a captured step
    // All rows have to be written: by decode, which rounds whole warps of one kv_head's outputs but
    // writes no halves, for lack of registers; or by prefill, which only writes halves.
    const int64_t width = cache.n_heads / cache.n_kv_heads * cache.head_dim;
    const bool decodes = kinds.fixed || kinds.rolling;
    const bool complete = decodes ? std::ssize(batch.segments) == batch.n_rows() &&
                                        batch.n_rows() <= cuda::kMatvecRows &&
                                        width % cuda::QuantizedRows::kGroup == 0
                                  : cuda::prefills_on_tiles(cache) && !archives;
    const auto next = matmul_.operands(complete ? attention.out : Tensor{}, decodes);
    const cuda::Operands& operands = next;
    for_turns(batch, [&](const cuda::DeviceBatch& turn, std::span<const Segment> segments,
                         bool are_drafts) {
      if (are_drafts) {
        cuda::record_drafts(stream_, cache, batch.journal->layer(cache.layer), turn, archives);
      }
      cuda::store_kv(stream_, attention, cache, turn);
      if (decodes) {
        cuda::RecalledSums recalled;
        if (archives) recalled = cuda::recall(stream_, attention, cache, turn, recalls);
        cuda::decode(stream_, attention, cache, turn, kinds, operands.rounded, recalled);
        if (archives) cuda::archive_evicted(stream_, cache, turn);
      }
      for (const Segment& segment : segments) {
        if (segment.n_rows == 1) continue;
        cuda::prefill_attention(stream_, attention, cache, segment, recalls, operands);
        if (attention.evicts) cuda::admit(stream_, cache, segment, archives);
      }
    });
  }

  void retract(std::span<const KvView> layers, const KvJournal& journal,
               const Retraction& drafts) override {
    use_device();
    for (const KvView& layer : layers) {
      cuda::retract(stream_, layer, journal.layer(layer.layer), drafts);
    }
  }

  void delta_net(const DeltaNet& layer, const KvView& cache, const Batch& batch) override {
    for_turns_of_states(cache, batch, [&](const cuda::DeviceBatch& turn) {
      cuda::delta_net(stream_, layer, cache, turn);
    });
  }

  void short_conv(const ShortConv& layer, const KvView& cache, const Batch& batch) override {
    for_turns_of_states(cache, batch, [&](const cuda::DeviceBatch& turn) {
      cuda::short_conv(stream_, layer, cache, turn);
    });
  }

  void compute_rope_table(Tensor rope_table, const Rope& rope) override {
    use_device();
    cuda::compute_rope_table(stream_, rope_table, rope);
  }

  void roll(const KvView& cache, const Rope& rope, int32_t sequence, int32_t length) override {
    use_device();
    cuda::roll(stream_, cache, rope, sequence, length);
  }

 private:
  // The current device is per host thread.
  void use_device() const { check(cudaSetDevice(stream_.device()), "choose the device"); }

  // Calls body(turn, its segments, are they drafts?) for each turn that has some.
  template <class Body>
  void for_turns(const Batch& batch, const Body& body) const {
    for (int32_t i = 0; i < batch.n_turns(); ++i) {
      const std::span<const Segment> segments = batch.turn(i);
      if (!segments.empty()) body(batch_.turn(batch, i), segments, i > 0);
    }
  }

  // Calls body(turn), after copying the states that drafts will overwrite.
  template <class Body>
  void for_turns_of_states(const KvView& cache, const Batch& batch, const Body& body) const {
    for_turns(batch, [&](const cuda::DeviceBatch& turn, std::span<const Segment>, bool are_drafts) {
      if (are_drafts) {
        cuda::record_states(stream_, cache, batch.journal->layer(cache.layer), turn);
      }
      body(turn);
    });
  }

  void begin(const Batch& batch) {
    use_device();
    batch_ = batches_.copy(batch);
    matmul_.compute_alone(batch_.alone);
  }

  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (bytes == 0) return;
    use_device();
    check(cudaMemcpyAsync(to, from, bytes, kind, stream_.get()), "copy");
    stream_.synchronize();
  }

  cuda::Stream stream_;
  cuda::GraphSwitch graphs_;
  cuda::AsyncCopy copies_;
  cuda::BatchCopier batches_;
  cuda::DeviceBatch batch_{};  // of the running pass
  cuda::Matmul matmul_;
  Buffer staged_;  // reads of tokens: a copy to memory that is not pinned takes longer to start
};

}  // namespace

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

size_t cuda_free_memory(int device) {
  check_device(device);
  check(cudaSetDevice(device), "choose the device");
  return device_memory().free;
}

std::unique_ptr<Backend> make_cuda_backend(int device) {
  check_device(device);
  return std::make_unique<CudaBackend>(device);
}

}  // namespace h2o
