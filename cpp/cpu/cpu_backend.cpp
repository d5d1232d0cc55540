#include "cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "cpu/attention/attention.h"
#include "cpu/attention/rotate.h"
#include "cpu/isa/detect.h"
#include "cpu/machine.h"
#include "cpu/matmul/interleave.h"
#include "cpu/routes.h"
#include "cpu/thread_pool.h"

namespace h2o {
namespace {

constexpr size_t kCacheLine = 64;

// Of a thread. What it does not use is never touched, and takes no memory.
constexpr int64_t kWorkspace = std::max(kInt8Workspace, kBf16Workspace);

// Rows of a product that are not divided: a thread reads a panel of weights for them.
constexpr int64_t kLeastRows = 48;

// As many tiles of a product for each thread even out what they take.
constexpr int64_t kPartsPerThread = 4;

class CpuBackend final : public Backend {
 public:
  CpuBackend(int n_threads, const CpuKernels& kernels, bool repacks)
      : kernels_(kernels),
        repacks_(repacks),
        pool_(n_threads),
        panels_(allocate(n_threads * kWorkspace)) {}

  std::string name() const override {
    return text("cpu (", kernels_.isa, ", ", pool_.size(),
                pool_.size() == 1 ? " thread" : " threads", ")");
  }

  Buffer allocate(size_t bytes) override {
    if (bytes == 0) return {};
    // calloc, because the system gives zeroed pages only when they are touched. The block it
    // returned is remembered in the cache line before the data.
    char* block = static_cast<char*>(std::calloc(1, bytes + 2 * kCacheLine));
    if (block == nullptr) throw OutOfMemory(text("cannot allocate ", bytes, " bytes"));
    const size_t past = reinterpret_cast<uintptr_t>(block) % kCacheLine;
    char* data = block + 2 * kCacheLine - past;
    std::memcpy(data - sizeof(block), &block, sizeof(block));
    return {data, bytes, [](void* p) noexcept {
              char* start;
              std::memcpy(&start, static_cast<char*>(p) - sizeof(start), sizeof(start));
              std::free(start);
            }};
  }

  Buffer allocate_host(size_t bytes) override { return allocate(bytes); }

  bool maps_weights() const override { return true; }

  bool expect_weights(size_t bytes) override { return repacks_ && bytes <= available_memory(); }

  size_t upload_bytes(const Tensor& host) const override {
    return kernels_.of(host.dtype).interleaved_matmul != nullptr ? interleaved_bytes(host) : 0;
  }

  Tensor upload(const Tensor& host, std::byte* to) override {
    // Here, because nothing allocates in a forward pass.
    const TypeKernels& type = kernels_.of(host.dtype);
    if (type.int8_matmul != nullptr) reserve(int8_bytes(host.cols));
    if (type.bf16_matmul != nullptr) reserve(bf16_bytes(host.cols));
    if (to == nullptr) return host;
    pool_.parallel_for((host.rows + kInterleaved - 1) / kInterleaved,
                       [&](int, int64_t begin, int64_t end) {
                         for (int64_t i = begin; i < end; ++i) {
                           interleave(to + i * kInterleaved * host.row_bytes(), host, i);
                         }
                       });
    return {to, host.dtype, host.rows, host.cols, true};
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
      const std::byte* values = rows_.data();
      if (table.interleaved) {
        read_interleaved_row(rows_.data(), table, batch.tokens[i]);
      } else {
        values = table.row(batch.tokens[i]);
      }
      type.decode(row(x, i), values, x.cols);
    }
  }

  void add_positions(Tensor x, const Tensor& table, const Batch& batch) override {
    for (int64_t i = 0; i < x.rows; ++i) {
      kernels_.add(row(x, i), row(table, batch.positions[i]), x.cols);
    }
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

  void matmul(Tensor y, const Tensor& x, const Affine& w) override { multiply(y, x, w, false); }

  void matmul_add(Tensor y, const Tensor& x, const Affine& w) override { multiply(y, x, w, true); }

  void relu(Tensor x) override {
    for_rows(x, [&](int64_t i) { kernels_.relu(row(x, i), x.cols); });
  }

  void gelu_tanh(Tensor x) override {
    for_elements(x, [&](int64_t i, int64_t n) { kernels_.gelu_tanh(x.floats() + i, n); });
  }

  void gelu_erf(Tensor x) override {
    for_elements(x, [&](int64_t i, int64_t n) { kernels_.gelu_erf(x.floats() + i, n); });
  }

  void swiglu(Tensor up, const Tensor& gate) override {
    for_elements(
        up, [&](int64_t i, int64_t n) { kernels_.swiglu(up.floats() + i, gate.floats() + i, n); });
  }

  void swiglu_clamped(Tensor up, const Tensor& gate) override {
    for_elements(up, [&](int64_t i, int64_t n) {
      kernels_.swiglu_clamped(up.floats() + i, gate.floats() + i, n);
    });
  }

  void geglu(Tensor up, const Tensor& gate) override {
    for_rows(up, [&](int64_t i) { kernels_.geglu(row(up, i), row(gate, i), up.cols); });
  }

  void add(Tensor y, const Tensor& x) override {
    for_rows(y, [&](int64_t i) { kernels_.add(row(y, i), row(x, i), y.cols); });
  }

  void scale(Tensor x, float factor) override {
    for_rows(x, [&](int64_t i) { kernels_.scale(row(x, i), x.cols, factor); });
  }

  void softcap(Tensor x, float cap) override {
    for_rows(x, [&](int64_t i) { kernels_.softcap(row(x, i), x.cols, cap); });
  }

  bool changes_logits() const override { return true; }

  bool computes_mixtures() const override { return true; }

  void route(const Routes& routes, Tensor logits) override {
    for_rows(logits, [&](int64_t i) {
      float largest = 0;
      const float total = kernels_.powers(row(logits, i), logits.cols, 1, &largest);
      kernels_.scale(row(logits, i), logits.cols, 1 / total);
      choose_experts(routes, row(logits, i), i);
    });
    place_rows(routes, logits.rows);
  }

  void dispatch(Tensor y, const Tensor& x, const Routes& routes) override {
    for_rows(x, [&](int64_t i) {
      for (int32_t j = 0; j < routes.n_used; ++j) {
        std::memcpy(row(y, routes.places[i * routes.n_used + j]), row(x, i), x.row_bytes());
      }
    });
  }

  void matmul_experts(Tensor y, const Tensor& x, const Affine& w, const Routes& routes) override {
    const auto part = [](const Tensor& t, int64_t begin, int64_t end) {
      return Tensor{t.row(begin), t.dtype, end - begin, t.cols, t.interleaved};
    };
    for (int32_t e = 0; e < routes.n_experts; ++e) {
      const int64_t begin = routes.offsets[e], end = routes.offsets[e + 1];
      if (begin == end) continue;
      const Affine expert = {part(w.weight, e * y.cols, (e + 1) * y.cols),
                             w.bias ? part(w.bias, e, e + 1) : Tensor{}};
      multiply(part(y, begin, end), part(x, begin, end), expert, false);
    }
  }

  void combine_add(Tensor y, const Tensor& x, const Routes& routes) override {
    for_rows(y, [&](int64_t i) {
      for (int64_t j = i * routes.n_used; j < (i + 1) * routes.n_used; ++j) {
        kernels_.f32.add_rows({.y = row(y, i),
                               .p = &routes.weights[j],
                               .rows = x.row(routes.places[j]),
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
      const float* logits = row(x, i);
      int32_t best = 0;
      for (int32_t j = 1; j < x.cols; ++j) {
        // Written so that anything is larger than NaN.
        if (logits[j] > logits[best] || (logits[best] != logits[best] && logits[j] == logits[j])) {
          best = j;
        }
      }
      tokens[i] = best;
    });
  }

  size_t attend_workspace(const KvView& shape) const override {
    return h2o::attend_workspace(shape, pool_.size());
  }

  void attend(const Attention& attention, const KvView& cache, const Batch& batch) override {
    h2o::attend(kernels_, pool_, attention, cache, batch);
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

  // Consecutive elements, of any rows. A power takes as long as so many multiply-adds.
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

  void multiply(const Tensor& y, const Tensor& x, const Affine& w, bool add) {
    const TypeKernels& type = kernels_.of(w.weight.dtype);
    const Matmul m{.y = y.floats(),
                   .x = x.floats(),
                   .w = w.weight.data,
                   .bias = w.bias ? w.bias.floats() : nullptr,
                   .n_rows = x.rows,
                   .n_in = x.cols,
                   .w_row_bytes = w.weight.row_bytes(),
                   .y_stride = y.cols,
                   .add = add};
    if (type.int8_matmul != nullptr) {
      multiply_int8(type, w.weight.interleaved ? type.interleaved_matmul : type.int8_matmul, m,
                    w.weight.rows);
    } else if (type.bf16_matmul != nullptr) {
      multiply_bf16(type, m, w.weight.rows);
    } else {
      for_columns(m, w.weight.rows,
                  [&](int, int64_t begin, int64_t end) { type.matmul(m, begin, end); });
    }
  }

  // Rounds kInt8Rows rows of x at a time, then multiplies.
  void multiply_int8(const TypeKernels& type, decltype(type.int8_matmul) kernel, Matmul m,
                     int64_t n_out) {
    reserve(int8_bytes(m.n_in));
    const int64_t n_rows = m.n_rows;
    for (int64_t row = 0; row < n_rows; row += kInt8Rows) {
      m.n_rows = std::min(n_rows - row, kInt8Rows);
      const Int8Rows x = int8_rows(m.n_rows, m.n_in, type.int8_group);
      pool_.parallel_for(m.n_rows, m.n_rows * m.n_in, [&](int, int64_t begin, int64_t end) {
        kernels_.quantize_rows(x, m.x, begin, end);
      });
      const auto rows = [&](int64_t first, int64_t n) {
        const int64_t at = first * m.n_in;
        return Int8Rows{x.q + at, x.scales + at / 32, x.sums + at / x.group, n, x.n_in, x.group};
      };
      for_tiles(m, n_out, [&](int thread, int64_t first, int64_t n, int64_t begin, int64_t end) {
        Matmul some = m;
        some.y += first * m.y_stride;
        some.n_rows = n;
        kernel(some, rows(first, n), begin, end, panels_.data() + thread * kWorkspace);
      });
      m.x += m.n_rows * m.n_in;
      m.y += m.n_rows * m.y_stride;
    }
  }

  // The same with kBf16Rows rows.
  void multiply_bf16(const TypeKernels& type, Matmul m, int64_t n_out) {
    reserve(bf16_bytes(m.n_in));
    const int64_t n_rows = m.n_rows;
    for (int64_t row = 0; row < n_rows; row += kBf16Rows) {
      m.n_rows = std::min(n_rows - row, kBf16Rows);
      const Bf16Rows x{rows_.as<BF16>(), m.n_rows, m.n_in};
      const int64_t n_blocks = (m.n_rows + kBf16Block - 1) / kBf16Block;
      pool_.parallel_for(n_blocks, m.n_rows * m.n_in, [&](int, int64_t begin, int64_t end) {
        kernels_.round_rows(x, m.x, begin * kBf16Block, std::min(end * kBf16Block, m.n_rows));
      });
      for_columns(m, n_out, [&](int thread, int64_t begin, int64_t end) {
        type.bf16_matmul(m, x, begin, end, panels_.data() + thread * kWorkspace);
      });
      m.x += m.n_rows * m.n_in;
      m.y += m.n_rows * m.y_stride;
    }
  }

  // Hands out panels of columns; and where these are few, of some of the rows.
  template <class Body>
  void for_tiles(const Matmul& m, int64_t n_out, const Body& body) {
    const int64_t width = m.n_rows == 1 ? kInterleaved : kInt8Columns;
    const int64_t n_panels = (n_out + width - 1) / width;
    const int64_t wanted = (kPartsPerThread * pool_.size() + n_panels - 1) / n_panels;
    const int64_t n_parts = std::clamp<int64_t>(m.n_rows / kLeastRows, 1, wanted);
    const int64_t n_rows = n_parts == 1 ? m.n_rows : padded((m.n_rows + n_parts - 1) / n_parts);
    const int64_t n_tiles = n_panels * ((m.n_rows + n_rows - 1) / n_rows);
    const int64_t per_panel = n_tiles / n_panels;
    pool_.parallel_for(n_tiles, m.n_rows * m.n_in * n_out,
                       [&](int thread, int64_t begin, int64_t end) {
                         if (per_panel == 1) {
                           body(thread, 0, m.n_rows, begin * width, std::min(end * width, n_out));
                           return;
                         }
                         for (int64_t i = begin; i < end; ++i) {
                           const int64_t first = i % per_panel * n_rows;
                           const int64_t column = i / per_panel * width;
                           body(thread, first, std::min(n_rows, m.n_rows - first), column,
                                std::min(column + width, n_out));
                         }
                       });
  }

  // Whole tiles of rows, of every instruction set.
  static int64_t padded(int64_t n_rows) { return (n_rows + 11) / 12 * 12; }

  // Hands out whole panels of columns.
  template <class Body>
  void for_columns(const Matmul& m, int64_t n_out, const Body& body) {
    const int64_t n_panels = (n_out + kInt8Columns - 1) / kInt8Columns;
    pool_.parallel_for(n_panels, m.n_rows * m.n_in * n_out,
                       [&](int thread, int64_t begin, int64_t end) {
                         body(thread, begin * kInt8Columns, std::min(end * kInt8Columns, n_out));
                       });
  }

  // What the rounded rows of one call take.
  static int64_t int8_bytes(int64_t n_in) {
    return kInt8Rows * (n_in + n_in / 32 * 4 + n_in / kInt8Group * 4);
  }
  static int64_t bf16_bytes(int64_t n_in) {
    const int64_t n_blocks = (n_in + kBf16Block - 1) / kBf16Block;
    return kBf16Rows * n_blocks * kBf16Block * static_cast<int64_t>(sizeof(BF16));
  }

  // It only ever grows.
  void reserve(int64_t bytes) {
    if (static_cast<size_t>(bytes) > rows_.size()) rows_ = allocate(bytes);
  }

  Int8Rows int8_rows(int64_t n_rows, int64_t n_in, int64_t group) const {
    auto* q = rows_.as<int8_t>();
    auto* scales = reinterpret_cast<float*>(q + n_rows * n_in);
    auto* sums = reinterpret_cast<int32_t*>(scales + n_rows * n_in / 32);
    return {q, scales, sums, n_rows, n_in, group};
  }

  const CpuKernels& kernels_;
  const bool repacks_;  // weights, where there is memory
  ThreadPool pool_;
  Buffer panels_;  // kWorkspace bytes for each thread
  Buffer rows_;    // of x, rounded
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int n_threads, const std::string& isa, bool repacks,
                                          bool exact) {
  require(n_threads >= 0 && n_threads <= 1024, "threads is ", n_threads,
          ", expected 1 to 1024, or 0 for all cores");
  if (n_threads == 0) n_threads = physical_cores();
  return std::make_unique<CpuBackend>(n_threads, choose_kernels(isa, exact), repacks);
}

}  // namespace h2o
