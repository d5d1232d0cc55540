// Throughput of multiplying one or a few rows of activations with quantized weights, compared with
// only reading as many bytes: GB/s for each type, layout and instruction set, with one thread and
// with all. A single row is multiplied with interleaved weights with and without software prefetch:
// CpuKernels::prefetches says which of them the engine uses.
//
// ninja h2o_bench_matvec && tests/cpp/h2o_bench_matvec [MiB of weights [rounds [TYPE,TYPE...
// [rows]]]]
//
// Each round measures all of them, and the median over rounds is reported: another program that
// runs for a while affects all of them equally.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <string>

#include "cpu/cpu_backend.h"
#include "cpu/isa/detect.h"
#include "cpu/matmul/interleave.h"
#include "cpu/thread_pool.h"

namespace h2o {
namespace {

constexpr int64_t kDepth = 2048;

// With one thread the processor time, which excludes other programs.
double seconds(int n_threads, const std::function<void()>& work) {
  const auto begun = std::chrono::steady_clock::now();
  const std::clock_t processor = std::clock();
  work();
  if (n_threads == 1) return static_cast<double>(std::clock() - processor) / CLOCKS_PER_SEC;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

uint64_t sum_of(const std::byte* data, int64_t begin, int64_t end) {
  uint64_t sums[32] = {};
  for (int64_t i = begin; i + 256 <= end; i += 256) {
    uint64_t words[32];
    std::memcpy(words, data + i, sizeof(words));
    for (int j = 0; j < 32; ++j) sums[j] += words[j];
  }
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

class Bench {
 public:
  Bench(int64_t bytes, int n_threads, int64_t n_rows)
      : backend_(make_cpu_backend(1, "")),
        pool_(n_threads),
        weights_(backend_->allocate_whole(bytes)),
        workspaces_(backend_->allocate(n_threads * kInt8Workspace)),
        n_rows_(n_rows),
        x_(n_rows * kDepth),
        q_(n_rows * kDepth),
        scales_(n_rows * kDepth / 32),
        sums_(n_rows * kDepth / kInt8Group),
        y_(n_rows * (bytes / byte_size(DType::iq1_s, kDepth) + kInterleaved)) {
    // Finite halves of either sign, at any offset in a block.
    pool_.parallel_for(bytes, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        weights_.data()[i] = static_cast<std::byte>((i * 2654435761u >> 16) & 0xbb);
      }
    });
    for (int64_t i = 0; i < n_rows * kDepth; ++i) x_[i] = static_cast<float>(i * 37 % 200 - 100);
  }

  void read() {
    pool_.parallel_for(std::ssize(weights_bytes()) / 4096, [&](int, int64_t begin, int64_t end) {
      total_ = total_ + sum_of(weights_.data(), begin * 4096, end * 4096);
    });
  }

  int64_t multiply(const CpuKernels& table, DType dtype, bool interleaved, bool prefetches) {
    const TypeKernels& type = table.of(dtype);
    const Int8Rows x{q_.data(), scales_.data(), sums_.data(), n_rows_, kDepth, type.int8_group};
    table.quantize_rows(x, x_.data(), 0, n_rows_);
    const int64_t row_bytes = Tensor{nullptr, dtype, 1, kDepth, interleaved}.row_bytes();
    const int64_t n_out =
        static_cast<int64_t>(weights_.size()) / row_bytes / kInt8Columns * kInt8Columns;
    const Matmul m{.y = y_.data(),
                   .x = x_.data(),
                   .w = weights_.data(),
                   .bias = nullptr,
                   .n_rows = n_rows_,
                   .n_in = kDepth,
                   .w_row_bytes = row_bytes,
                   .y_stride = n_out,
                   .add = false,
                   .prefetches = prefetches};
    const auto kernel = interleaved ? type.interleaved_matmul : type.int8_matmul;
    pool_.parallel_for(n_out / kInt8Columns, [&](int thread, int64_t begin, int64_t end) {
      kernel(m, x, begin * kInt8Columns, end * kInt8Columns,
             workspaces_.data() + thread * kInt8Workspace);
    });
    return n_out * row_bytes;
  }

  std::span<const std::byte> weights_bytes() const { return {weights_.data(), weights_.size()}; }

 private:
  std::unique_ptr<Backend> backend_;
  ThreadPool pool_;
  Buffer weights_, workspaces_;
  int64_t n_rows_;
  std::vector<float> x_;
  std::vector<int8_t> q_;
  std::vector<float> scales_;
  std::vector<int32_t> sums_;
  std::vector<float> y_;
  volatile uint64_t total_ = 0;
};

void run(int64_t bytes, int n_threads, int n_rounds, const std::string& types, int64_t n_rows) {
  Bench bench(bytes, n_threads, n_rows);
  std::map<std::string, std::vector<double>> rates;
  const auto record = [&](const std::string& name, const std::function<int64_t()>& work) {
    int64_t done = 0;
    const double time = seconds(n_threads, [&] { done = work(); });
    rates[name].push_back(static_cast<double>(done) / time / 1e9);
  };
  for (int round = 0; round < n_rounds; ++round) {
    record(" reading", [&] {
      bench.read();
      return bytes;
    });
    for (const DType dtype : computable_dtypes()) {
      const std::string type(info(dtype).name);
      if (!is_quantized(dtype) || ("," + types + ",").find("," + type + ",") == std::string::npos) {
        continue;
      }
      for (const CpuKernels* table : supported_kernels()) {
        if (table->bf16.bf16_matmul != nullptr || std::string(table->isa) == "scalar") continue;
        const auto multiply = [&](const char* name, bool interleaved, bool prefetches) {
          record(type + name + table->isa, [&, interleaved, prefetches] {
            return bench.multiply(*table, dtype, interleaved, prefetches);
          });
        };
        multiply(" in place                 ", false, true);
        if (table->of(dtype).interleaved_matmul == nullptr) continue;
        multiply(" interleaved              ", true, false);
        if (n_rows == 1) multiply(" interleaved, prefetching ", true, true);
      }
    }
  }
  const double reading = median(rates[" reading"]);
  for (const auto& [name, values] : rates) {
    std::printf("%-50s %d threads %6.1f GB/s (best %5.1f) %4.0f%%\n", name.c_str(), n_threads,
                median(values), *std::ranges::max_element(values), 100 * median(values) / reading);
  }
}

}  // namespace
}  // namespace h2o

int main(int argc, char** argv) {
  const int64_t bytes = (argc > 1 ? std::atoll(argv[1]) : 256) << 20;
  const int n_rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  const std::string types = argc > 3 ? argv[3] : "Q8_0,Q4_0,Q4_K,Q5_K,Q6_K,IQ4_XS";
  const int64_t n_rows = argc > 4 ? std::atoll(argv[4]) : 1;
  h2o::run(bytes, 1, n_rounds, types, n_rows);
  if (const int n = h2o::physical_cores(); n > 1) h2o::run(bytes, n, n_rounds, types, n_rows);
}
