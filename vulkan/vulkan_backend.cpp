#include "vulkan/vulkan_backend.h"

#include <algorithm>
#include <cstring>
#include <ranges>

#include "core/error.h"
#include "vulkan/attention/attend.h"
#include "vulkan/codebooks.h"
#include "vulkan/operations.h"
#include "vulkan/runtime/captured_pass.h"

namespace h2o {
namespace {

using vulkan::address_of;
using vulkan::Heap;
using vulkan::Map;

constexpr size_t kStagedBytes = size_t{4} << 20;

Map map_of(Gate kind) {
  switch (kind) {
    case Gate::swiglu:
      return Map::swiglu;
    case Gate::swiglu_clamped:
      return Map::swiglu_clamped;
    case Gate::geglu:
      return Map::geglu;
    default:
      return Map::sigmoid_gate;
  }
}

class VulkanBackend final : public Backend {
 public:
  explicit VulkanBackend(int device)
      : memory_(vulkan::Memory::of(device)),
        commands_(memory_),
        batches_(*memory_),
        staged_(memory_->allocate(Heap::Kind::host, kStagedBytes)) {}

  std::string name() const override { return concat("vulkan (", memory_->device.name, ")"); }

  const Capabilities& capabilities() const override {
    static const Capabilities capabilities{
        .kv_dtypes = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q5_0, DType::q4_0},
        .max_head_dim = 1024,  // MOST_DIMS of the shaders
        .max_experts = 1024,   // MOST_EXPERTS of route.comp
        .largest_logits = true,
        .shared_values = true,
        .state_spaces = true,
        .divided_experts = true,
        .whole_texts = true,
    };
    return capabilities;
  }

  Buffer allocate(size_t bytes) override {
    Buffer buffer = memory_->allocate(Heap::Kind::device, bytes);
    if (bytes == 0) return buffer;
    commands_.barrier_after_copies();
    commands_.fill_zero(*memory_->own.find(buffer.data()), (bytes + 3) / 4 * 4);
    commands_.finish();
    return buffer;
  }

  Buffer allocate_host(size_t bytes) override {
    Buffer buffer = memory_->allocate(Heap::Kind::host, bytes);
    if (bytes > 0) std::memset(buffer.data(), 0, bytes);
    return buffer;
  }

  bool expect_weights(size_t bytes) override {
    const auto [free, total] = memory_->device.own_memory(memory_->own.allocated());
    if (bytes > free) {
      throw OutOfMemory(concat("[vulkan] the weights take ", bytes, " bytes, ", free,
                               " of the device's ", total, " are free"));
    }
    return true;
  }

  size_t upload_bytes(const Tensor& host) const override {
    return static_cast<size_t>(host.bytes());
  }

  Tensor upload(const Tensor& host, std::byte* to) override {
    codebooks_.require(*this, host.dtype);
    Tensor tensor = host;
    tensor.data = to;
    if (memory_->host.find(to)) {
      std::memcpy(to, host.data, host.bytes());
      tensor.data = reinterpret_cast<std::byte*>(memory_->host.address(to));
    } else {
      write(to, host.data, host.bytes());
    }
    return tensor;
  }

  void read(void* host, const void* device, size_t bytes) override {
    if (bytes == 0) return;
    const std::optional<vulkan::Range> direct = memory_->host.find(host);
    if (direct) return copy(*direct, *memory_->own.find(device), bytes);
    transfer(bytes, [&](size_t at, size_t n) {
      copy(staging(), *memory_->own.find(static_cast<const std::byte*>(device) + at), n);
      std::memcpy(static_cast<std::byte*>(host) + at, staged_.data(), n);
    });
  }

  void write(void* device, const void* host, size_t bytes) override {
    transfer(bytes, [&](size_t at, size_t n) {
      std::memcpy(staged_.data(), static_cast<const std::byte*>(host) + at, n);
      copy(*memory_->own.find(static_cast<std::byte*>(device) + at), staging(), n);
    });
  }

  void copy_async(std::span<const HostCopy> copies) override {
    commands_.barrier();
    for (const HostCopy& copy : copies) {
      commands_.copy(*memory_->own.find(copy.to), *memory_->host.find(copy.from), copy.bytes);
    }
  }

  void await_copies() override { commands_.barrier_after_copies(); }

  void finish() override { commands_.finish(); }

  void run(const Batch& batch, const std::function<void()>& pass) override {
    begin(batch);
    submit(pass);
  }

  void run(const Batch& batch, std::unique_ptr<CapturedGraph>& graph,
           const std::function<void()>& pass) override {
    const bool decodes = std::ranges::all_of(
        batch.segments, [](const Segment& segment) { return segment.n_rows == 1; });
    if (!decodes) return run(batch, pass);
    begin(batch);
    if (graph == nullptr) graph = std::make_unique<vulkan::CapturedPass>();
    static_cast<vulkan::CapturedPass&>(*graph).run(commands_, batch, pass);
  }

  void embed(Tensor x, const Tensor& table, const Batch&) override {
    vulkan::look_up(commands_, x, table, batch_.tokens, false, codebooks_.of(table.dtype));
  }

  void add_positions(Tensor x, const Tensor& table, const Batch&) override {
    vulkan::look_up(commands_, x, table, batch_.positions, true);
  }

  void scale_by_position(Tensor x, float scale, int32_t length, int32_t offset,
                         const Batch&) override {
    vulkan::scale_by_position(commands_, x, scale, length, offset, batch_.positions);
  }

  void rotate(Tensor q, Tensor k, int64_t head_dim, const Rope& rope, const Batch&) override {
    commands_.barrier();
    vulkan::rotate(commands_, q, head_dim, rope, batch_);
    vulkan::rotate(commands_, k, head_dim, rope, batch_);
  }

  void clamp(Tensor x, float limit) override { map(Map::clamp, x, {}, {{limit}}); }

  void layer_norm(Tensor y, const Tensor& x, const Affine& norm, float eps) override {
    vulkan::norm(commands_, y, x, norm, eps);
  }

  void rms_norm(Tensor y, const Tensor& x, const Tensor& weight, float eps) override {
    vulkan::norm(commands_, y, x, {weight, {}}, eps);
  }

  void matmul(std::initializer_list<Product> products, const Tensor& x) override {
    multiply(products, x);
  }

  void matmul_add(Tensor y, const Tensor& x, const Affine& w) override {
    const Product product{y, w};
    vulkan::multiply(commands_, codebooks_, {&product, 1}, x, true);
  }

  void relu(Tensor x) override { map(Map::relu, x); }
  void relu_squared(Tensor x) override { map(Map::relu_squared, x); }
  void gelu_tanh(Tensor x) override { map(Map::gelu_tanh, x); }
  void gelu_erf(Tensor x) override { map(Map::gelu_erf, x); }
  void xielu(Tensor x, const Xielu& f) override {
    map(Map::xielu, x, {}, {{f.alpha_p, f.alpha_n, f.beta, f.eps}});
  }
  void apply_gate(Gate kind, Tensor up, const Tensor& gate) override {
    map(map_of(kind), up, gate);
  }
  void add(Tensor y, const Tensor& x) override { map(Map::add, y, x); }
  void multiply(Tensor y, const Tensor& x) override { map(Map::multiply, y, x); }
  void scale(Tensor x, float factor) override { map(Map::scale, x, {}, {{factor}}); }
  void softcap(Tensor x, float cap) override { map(Map::softcap, x, {}, {{cap}}); }

  void split_blocks(Tensor a, Tensor b, const Tensor& x, int64_t width) override {
    const auto blocks = [&](const Tensor& of, int64_t step) {
      return Heads{of.floats(), of.cols, step};
    };
    commands_.barrier();
    Heads from = blocks(x, 2 * width);
    vulkan::copy_heads(commands_, blocks(a, width), from, x.rows, a.cols / width, width);
    from.first += width;
    vulkan::copy_heads(commands_, blocks(b, width), from, x.rows, a.cols / width, width);
  }

  void copy_heads(const Heads& to, const Heads& from, int64_t n_rows, int64_t n_heads,
                  int64_t width) override {
    commands_.barrier();
    vulkan::copy_heads(commands_, to, from, n_rows, n_heads, width);
  }

  void route(const Routes& routes, Tensor logits, const Tensor& bias) override {
    vulkan::route(commands_, routes, logits, bias);
  }

  void dispatch(Tensor y, const Tensor& x, const Routes& routes) override {
    vulkan::dispatch(commands_, y, x, routes);
  }

  void matmul_experts(std::initializer_list<Product> products, const Tensor& x,
                      const Routes& routes) override {
    multiply(products, x, &routes);
  }

  void combine_add(Tensor y, const Tensor& x, const Routes& routes) override {
    vulkan::combine_add(commands_, y, x, routes);
  }

  void gate_rows(Tensor x, const Tensor& gate) override { vulkan::gate_rows(commands_, x, gate); }

  void gather(Tensor y, const Tensor& x, const Batch&) override {
    vulkan::look_up(commands_, y, x, batch_.logits_rows, false);
  }

  void argmax(int32_t* tokens, const Tensor& x) override { vulkan::argmax(commands_, tokens, x); }

  void select_largest(LargestLogits* largest, const Tensor& x, const Batch&) override {
    vulkan::select_largest(commands_, largest, x, batch_.temperatures);
  }

  size_t attend_workspace(const KvView& shape) const override {
    return vulkan::workspace_bytes(shape);
  }

  void attend(const Attention& attention, const KvView& cache, const Batch& batch) override {
    vulkan::attend(commands_, attention, cache, batch_, batch);
  }

  void attend_whole(const Attention& attention, int64_t head_dim, const Batch& batch) override {
    vulkan::attend_whole(commands_, attention, head_dim, batch_, batch);
  }

  void delta_net(const DeltaNet& layer, const KvView& cache, const Batch& batch) override {
    vulkan::delta_net(commands_, layer, cache, batch_, std::ssize(batch.segments));
  }

  void short_conv(const ShortConv& layer, const KvView& cache, const Batch& batch) override {
    vulkan::short_conv(commands_, layer, cache, batch_, std::ssize(batch.segments));
  }

  void state_space(const StateSpace& layer, const KvView& cache, const Batch& batch) override {
    vulkan::state_space(commands_, layer, cache, batch_, std::ssize(batch.segments));
  }

  void compute_rope_table(Tensor rope_table, const Rope& rope) override {
    submit([&] { vulkan::compute_rope_table(commands_, rope_table, rope); });
  }

  void roll(const KvView& cache, const Rope& rope, int32_t sequence, int32_t length) override {
    submit([&] { vulkan::roll(commands_, cache, rope, sequence, length); });
  }

 private:
  // Places the batch, when no pass reads the last one any more.
  void begin(const Batch& batch) {
    batch_ = batches_.place(batch);
    commands_.finish();
    batches_.write(batch);
  }

  // Submits what `record` records. If it throws, what it recorded is computed now, as on other
  // back ends: copies to be made are not lost, and no memory that is freed later is used.
  template <class Record>
  void submit(const Record& record) {
    try {
      record();
    } catch (...) {
      commands_.submit();
      throw;
    }
    commands_.submit();
  }

  void multiply(std::initializer_list<Product> products, const Tensor& x,
                const Routes* routes = nullptr) {
    vulkan::multiply(commands_, codebooks_, {products.begin(), products.size()}, x, false, routes);
  }

  void map(Map kind, const Tensor& x, const Tensor& gate = {},
           const vulkan::MapParameters& parameters = {}) {
    vulkan::map(commands_, kind, x, gate, parameters);
  }

  vulkan::Range staging() const { return *memory_->host.find(staged_.data()); }

  // Copies, and waits for it.
  void copy(const vulkan::Range& to, const vulkan::Range& from, size_t bytes) {
    commands_.barrier_after_copies();
    commands_.copy(to, from, bytes);
    commands_.finish();
  }

  // Calls part(offset, bytes) for parts of a transfer that fit into the staging memory.
  template <class Part>
  void transfer(size_t bytes, const Part& part) {
    for (size_t at = 0; at < bytes; at += kStagedBytes) {
      part(at, std::min(kStagedBytes, bytes - at));
    }
  }

  std::shared_ptr<vulkan::Memory> memory_;
  vulkan::Commands commands_;
  vulkan::BatchMemory batches_;
  vulkan::Codebooks codebooks_;
  vulkan::DeviceBatch batch_{};  // of the running pass
  Buffer staged_;
};

}  // namespace

int vulkan_device_count() {
  return vulkan::Instance::get() == nullptr ? 0 : static_cast<int>(vulkan::usable_devices().size());
}

std::unique_ptr<Backend> make_vulkan_backend(int device) {
  return std::make_unique<VulkanBackend>(device);
}

}  // namespace h2o
