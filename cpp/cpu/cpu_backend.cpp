#include "cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "cpu/allocate.h"
#include "cpu/attention/attention.h"
#include "cpu/attention/drafts.h"
#include "cpu/attention/rotate.h"
#include "cpu/attention/whole.h"
#include "cpu/isa/detect.h"
#include "cpu/machine.h"
#include "cpu/matmul/cpu_matmul.h"
#include "cpu/matmul/interleave.h"
#include "cpu/recurrent.h"
#include "cpu/routes.h"
#include "cpu/thread_pool.h"

namespace h2o {
namespace {

class CpuBackend final : public Backend {
 public:
  CpuBackend(int n_threads, const CpuKernels& kernels, Repack repack, bool exact)
      : kernels_(exact ? kernels.in_float() : kernels),
        repack_(repack),
        exact_(exact),
        pool_(n_threads),
        multiply_(kernels_, pool_) {}

  std::string name() const override {
    return concat("cpu (", kernels_.isa, exact_ ? ", exact, " : ", ", pool_.size(),
                  pool_.size() == 1 ? " thread" : " threads", ")");
  }

  std::string kernels() const override {
    return concat("cpu (", kernels_.isa, exact_ ? ", exact)" : ")");
  }

  const Capabilities& capabilities() const override {
    static const Capabilities capabilities{
        .kv_dtypes = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q5_0, DType::q4_0,
                      DType::q3, DType::q2},
        .independent_rows = true,
        .mapped_weights = true,
        .observed_products = true,
        .shared_values = true,
        .archives = true,
        .archive_files = true,
        .draft_rows = std::numeric_limits<int32_t>::max(),
        .state_spaces = true,
        .divided_experts = true,
        .whole_texts = true,
        .block_windows = true,
    };
    return capabilities;
  }

  Buffer allocate(size_t bytes) override { return allocate_zeros(bytes); }
  Buffer allocate_whole(size_t bytes) override { return allocate_huge(bytes); }
  Buffer allocate_host(size_t bytes) override { return allocate(bytes); }

  bool expect_weights(size_t bytes) override {
    return repack_ == Repack::always ||
           (repack_ == Repack::if_it_fits && bytes <= available_memory());
  }

  size_t upload_bytes(const Tensor& host) const override {
    return kernels_.of(host.dtype).interleaved_matmul != nullptr ? interleaved_bytes(host) : 0;
  }

  Tensor upload(const Tensor& host, std::byte* to) override {
    multiply_.reserve(host);  // here, because a forward pass allocates nothing
    if (to == nullptr) return host;
    const Tensor interleaved{to, host.dtype, host.rows, host.cols, true};
    pool_.parallel_for(
        (host.rows + kInterleaved - 1) / kInterleaved,
        [&, unpack = kernels_.of(host.dtype).unpack](int, int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            interleave(interleaved, host, i, unpack);
          }
        });
    return interleaved;
  }

  void read(void* host, const void* device, size_t bytes) override { copy(host, device, bytes); }
  void write(void* device, const void* host, size_t bytes) override { copy(device, host, bytes); }

  void copy_async(std::span<const HostCopy> copies) override {
    for (const HostCopy& one : copies) copy(one.to, one.from, one.bytes);
  }
  void await_copies() override {}

  void run(const Batch&, const std::function<void()>& pass) override { pass(); }

  void run(const Batch&, std::unique_ptr<CapturedGraph>&,
           const std::function<void()>& pass) override {
    pass();
  }

  void parallel_for(int64_t n, const std::function<void(int64_t i)>& body) override {
    pool_.parallel_for(n, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }

  void embed(Tensor x, const Tensor& table, const Batch& batch) override {
    const TypeKernels& type = kernels_.of(table.dtype);
    for (int64_t i = 0; i < x.rows; ++i) {
      if (!table.interleaved) {
        type.decode(row(x, i), table.row(batch.tokens[i]), x.cols);
        continue;
      }
      read_interleaved_row(multiply_.scratch(), table, batch.tokens[i]);
      const auto decode = type.decode_unpacked != nullptr ? type.decode_unpacked : type.decode;
      decode(row(x, i), multiply_.scratch(), x.cols);
    }
  }

  void add_positions(Tensor x, const Tensor& table, const Batch& batch) override {
    for (int64_t i = 0; i < x.rows; ++i) {
      kernels_.add(row(x, i), row(table, batch.positions[i]), x.cols);
    }
  }

  void scale_by_position(Tensor x, float scale, int32_t length, int32_t offset,
                         const Batch& batch) override {
    for_rows(x, [&](int64_t i) {
      const int32_t lengths = (batch.positions[i] + offset) / length;
      if (lengths == 0) return;
      const auto factor = static_cast<float>(1 + scale * std::log(1.0 + lengths));
      kernels_.scale(row(x, i), x.cols, factor);
    });
  }

  void rotate(Tensor q, Tensor k, int64_t head_dim, const Rope& rope, const Batch& batch) override {
    for_rows(q, [&](int64_t i) {
      const std::span<float> rows[] = {{row(q, i), static_cast<size_t>(q.cols)},
                                       {row(k, i), static_cast<size_t>(k.cols)}};
      rotate_heads(rows, head_dim, rope, batch.positions[i]);
    });
  }

  void clamp(Tensor x, float limit) override {
    for_rows(x, [&](int64_t i) { kernels_.clamp(row(x, i), x.cols, limit); });
  }

  void layer_norm(Tensor y, const Tensor& x, const Affine& norm, float eps) override {
    const float* weight = norm.weight.floats();
    const float* bias = norm.bias.floats();
    for_rows(x, [&](int64_t i) {
      kernels_.layer_norm(row(y, i), row(x, i), weight, bias, x.cols, eps);
    });
  }

  void rms_norm(Tensor y, const Tensor& x, const Tensor& weight, float eps) override {
    for_rows(x, [&](int64_t i) {
      kernels_.rms_norm(row(y, i), row(x, i), weight.floats(), x.cols, eps);
    });
  }

  void matmul(std::initializer_list<Product> products, const Tensor& x) override {
    multiply_(products, x, false);
  }

  void observe(ProductObserver observer) override { multiply_.observe(std::move(observer)); }

  void matmul_add(Tensor y, const Tensor& x, const Affine& w) override {
    multiply_({{y, w}}, x, true);
  }

  void relu(Tensor x) override {
    for_rows(x, [&](int64_t i) { kernels_.relu(row(x, i), x.cols); });
  }

  void relu_squared(Tensor x) override {
    for_rows(x, [&](int64_t i) { kernels_.relu_squared(row(x, i), x.cols); });
  }

  void gelu_tanh(Tensor x) override {
    for_elements(x, [&](int64_t i, int64_t n) { kernels_.gelu_tanh(x.floats() + i, n); });
  }

  void gelu_erf(Tensor x) override {
    for_elements(x, [&](int64_t i, int64_t n) { kernels_.gelu_erf(x.floats() + i, n); });
  }

  void xielu(Tensor x, const Xielu& f) override {
    for_elements(x, [&](int64_t i, int64_t n) {
      kernels_.xielu(x.floats() + i, n, f.alpha_p, f.alpha_n, f.beta, f.eps);
    });
  }

  void apply_gate(Gate kind, Tensor up, const Tensor& gate) override {
    const auto kernel = kind == Gate::swiglu           ? kernels_.swiglu
                        : kind == Gate::swiglu_clamped ? kernels_.swiglu_clamped
                        : kind == Gate::sigmoid        ? kernels_.sigmoid_gate
                                                       : kernels_.geglu;
    for_elements(up, [&](int64_t i, int64_t n) { kernel(up.floats() + i, gate.floats() + i, n); });
  }

  void split_blocks(Tensor a, Tensor b, const Tensor& x, int64_t width) override {
    for_rows(x, [&](int64_t i) {
      for (int64_t at = 0; at < a.cols; at += width) {
        std::copy_n(row(x, i) + 2 * at, width, row(a, i) + at);
        std::copy_n(row(x, i) + 2 * at + width, width, row(b, i) + at);
      }
    });
  }

  void copy_heads(const Heads& to, const Heads& from, int64_t n_rows, int64_t n_heads,
                  int64_t width) override {
    pool_.parallel_for(n_rows, n_rows * n_heads * width, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t h = 0; h < n_heads; ++h) {
          std::copy_n(from.first + i * from.row_step + h * from.head_step, width,
                      to.first + i * to.row_step + h * to.head_step);
        }
      }
    });
  }

  void multiply(Tensor y, const Tensor& x) override {
    for_rows(y, [&](int64_t i) { kernels_.multiply(row(y, i), row(x, i), y.cols); });
  }

  void add(Tensor y, const Tensor& x) override {
    for_rows(y, [&](int64_t i) { kernels_.add(row(y, i), row(x, i), y.cols); });
  }

  void scale(Tensor x, float factor) override {
    for_rows(x, [&](int64_t i) { kernels_.scale(row(x, i), x.cols, factor); });
  }

  void softcap(Tensor x, float cap) override {
    for_elements(x, [&](int64_t i, int64_t n) { kernels_.softcap(x.floats() + i, n, cap); });
  }

  void route(const Routes& routes, Tensor logits, const Tensor& bias) override {
    for_rows(logits, [&](int64_t i) {
      float* const scores = row(logits, i);
      if (routes.sigmoid) {
        for (int64_t e = 0; e < logits.cols; ++e) scores[e] = 1 / (1 + std::exp(-scores[e]));
      } else if (routes.spread == 0) {
        float largest = 0;
        const float total = kernels_.exponentiate(scores, logits.cols, 1, &largest);
        kernels_.scale(scores, logits.cols, 1 / total);
      }
      select_experts(routes, scores, bias ? bias.floats() : nullptr, i);
    });
    place_rows(routes, logits.rows);
  }

  void dispatch(Tensor y, const Tensor& x, const Routes& routes) override {
    for_rows(x, [&](int64_t i) {
      for (int32_t j = 0; j < routes.n_used; ++j) {
        const int64_t copy = i * routes.n_used + j;
        float* const to = row(y, routes.copy_rows[copy]);
        std::memcpy(to, row(x, i), x.row_bytes());
        if (routes.scales_inputs) kernels_.scale(to, x.cols, routes.weights[copy]);
      }
    });
  }

  void matmul_experts(std::initializer_list<Product> products, const Tensor& x,
                      const Routes& routes) override {
    multiply_.experts(products, x, {routes.n_experts, routes.offsets});
  }

  void combine_add(Tensor y, const Tensor& x, const Routes& routes) override {
    const float one = 1;
    for_rows(y, [&](int64_t i) {
      for (int64_t j = i * routes.n_used; j < (i + 1) * routes.n_used; ++j) {
        kernels_.f32.add_rows({.y = row(y, i),
                               .p = routes.scales_inputs ? &one : &routes.weights[j],
                               .rows = x.row(routes.copy_rows[j]),
                               .n_out = 1,
                               .n_rows = 1,
                               .n = x.cols,
                               .row_bytes = x.row_bytes(),
                               .p_stride = 1});
      }
    });
  }

  void gate_rows(Tensor x, const Tensor& gate) override {
    for_rows(x, [&](int64_t i) {
      kernels_.scale(row(x, i), x.cols, 1 / (1 + std::exp(-*row(gate, i))));
    });
  }

  void gather(Tensor y, const Tensor& x, const Batch& batch) override {
    for (int64_t i = 0; i < y.rows; ++i) {
      std::memcpy(row(y, i), row(x, batch.logits_rows[i]), x.row_bytes());
    }
  }

  void argmax(int32_t* tokens, const Tensor& x) override {
    for_rows(x, [&](int64_t i) {
      tokens[i] = static_cast<int32_t>(kernels_.argmax(row(x, i), x.cols));
    });
  }

  size_t attend_workspace(const KvView& shape) const override {
    return h2o::attend_workspace(kernels_, shape, pool_.size());
  }

  void attend(const Attention& attention, const KvView& cache, const Batch& batch) override {
    n_clamped_ += h2o::attend(kernels_, pool_, attention, cache, batch);
  }

  void retract(std::span<const KvView> layers, const KvJournal& journal,
               const Retraction& drafts) override {
    h2o::retract(kernels_, pool_, layers, journal, drafts);
  }

  void attend_whole(const Attention& attention, int64_t head_dim, const Batch& batch) override {
    h2o::attend_whole(kernels_, pool_, attention, head_dim, batch);
  }

  int64_t n_clamped() const override { return n_clamped_; }

  void delta_net(const DeltaNet& layer, const KvView& cache, const Batch& batch) override {
    h2o::delta_net(kernels_, pool_, layer, cache, batch);
  }

  void short_conv(const ShortConv& layer, const KvView& cache, const Batch& batch) override {
    h2o::short_conv(kernels_, pool_, layer, cache, batch);
  }

  void state_space(const StateSpace& layer, const KvView& cache, const Batch& batch) override {
    h2o::state_space(kernels_, pool_, layer, cache, batch);
  }

  void compute_rope_table(Tensor rope_table, const Rope& rope) override {
    for (int64_t i = 0; i < rope_table.rows; ++i) {
      h2o::compute_rope_table(row(rope_table, i), rope, static_cast<int32_t>(i));
    }
  }

  void roll(const KvView& cache, const Rope& rope, int32_t sequence, int32_t length) override {
    for (int32_t h = 0; h < cache.n_kv_heads; ++h) {
      roll_head(kernels_, cache, rope, cache.head(sequence, h), length);
    }
  }

 private:
  static void copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }

  static float* row(const Tensor& x, int64_t i) { return x.floats() + i * x.cols; }

  template <class Body>
  void for_rows(const Tensor& x, const Body& body) {
    pool_.parallel_for(x.rows, x.rows * x.cols, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }

  // Calls body(first element, number of elements). kPower: the cost of an exponential, in
  // multiply-adds.
  template <class Body>
  void for_elements(const Tensor& x, const Body& body) {
    constexpr int64_t kTogether = 256;
    constexpr int64_t kPower = 32;
    const int64_t n = x.rows * x.cols;
    pool_.parallel_for((n + kTogether - 1) / kTogether, kPower * n,
                       [&](int, int64_t begin, int64_t end) {
                         body(begin * kTogether, std::min(end * kTogether, n) - begin * kTogether);
                       });
  }

  const CpuKernels kernels_;
  const Repack repack_;
  const bool exact_;
  ThreadPool pool_;
  CpuMatmul multiply_;
  std::atomic<int64_t> n_clamped_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int n_threads, const std::string& isa, Repack repack,
                                          bool exact) {
  require(n_threads >= 0 && n_threads <= 1024, "threads is ", n_threads,
          ", expected 1 to 1024, or 0 for all cores");
  if (n_threads == 0) n_threads = physical_cores();
  return std::make_unique<CpuBackend>(n_threads, choose_kernels(isa, exact), repack, exact);
}

}  // namespace h2o
