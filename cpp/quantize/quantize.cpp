// Quantizers by type, validation, and parallel execution.
#include "quantize/quantize.h"

#include <array>
#include <atomic>
#include <exception>
#include <future>
#include <mutex>
#include <span>

#include "core/error.h"
#include "quantize/blocks.h"

namespace h2o {
namespace {

struct Row {
  DType dtype;
  QuantizeBlock quantize;
};

// Quantizes types that are rounded without a search.
template <bool (*round)(uint8_t* out, const float* x)>
bool rounded(uint8_t* out, const float* x, const float*) {
  return round(out, x);
}

constexpr std::array kTypes = {
    Row{DType::q4_0, rounded<quantize_q4_0>}, Row{DType::q4_1, rounded<quantize_q4_1>},
    Row{DType::q5_0, rounded<quantize_q5_0>}, Row{DType::q5_1, rounded<quantize_q5_1>},
    Row{DType::q8_0, rounded<quantize_q8_0>}, Row{DType::q2_k, quantize_q2_k},
    Row{DType::q3_k, quantize_q3_k},          Row{DType::q4_k, quantize_q4_k},
    Row{DType::q5_k, quantize_q5_k},          Row{DType::q6_k, quantize_q6_k},
    Row{DType::iq4_nl, quantize_iq4_nl},      Row{DType::iq4_xs, quantize_iq4_xs},
};

// Normalized to a mean of 1. Columns that were never used get a small weight, because other inputs
// may use them.
std::vector<float> relative_importance(std::span<const float> importance, int64_t n_cols) {
  if (importance.empty()) return std::vector<float>(n_cols, 1.0f);
  require(std::ssize(importance) == n_cols, "[quantize] ", importance.size(),
          " numbers of importance, expected one for each of ", n_cols, " columns");
  double sum = 0.0;
  for (const float one : importance) {
    require(std::isfinite(one) && one >= 0.0f, "[quantize] importance ", one,
            ", expected a number of 0 or more");
    sum += one;
  }
  if (sum == 0.0) return std::vector<float>(n_cols, 1.0f);
  constexpr float kMin = 1e-4f;
  std::vector<float> relative;
  for (const float one : importance) {
    relative.push_back(std::max(kMin, static_cast<float>(one / sum * static_cast<double>(n_cols))));
  }
  return relative;
}

QuantizeBlock block_quantizer(DType dtype) {
  for (const Row& row : kTypes) {
    if (row.dtype == dtype) return row.quantize;
  }
  throw InvalidArgument(concat("[quantize] cannot write ", info(dtype).name));
}

// Work is divided into chunks of about this many weights.
constexpr int64_t kPiece = 1 << 15;

}  // namespace

std::vector<DType> quantizable_types() {
  std::vector<DType> types;
  for (const Row& row : kTypes) types.push_back(row.dtype);
  return types;
}

void quantize_rows(DType dtype, std::byte* out, const float* x, int64_t n_rows, int64_t n_cols,
                   int n_threads, std::span<const float> importance) {
  const QuantizeBlock quantize = block_quantizer(dtype);
  const DTypeInfo& layout = info(dtype);
  require(n_rows >= 0 && n_cols >= 0 && n_cols % layout.block_size == 0, "[quantize] ", n_rows,
          " rows of ", n_cols, ", expected a multiple of ", layout.block_size, " for ",
          layout.name);
  require(n_threads >= 1, "[quantize] ", n_threads, " threads, expected at least one");

  const std::vector<float> counts = relative_importance(importance, n_cols);
  const auto quantize_row = [&](int64_t row) {
    const float* values = x + row * n_cols;
    auto* bytes = reinterpret_cast<uint8_t*>(out + row * byte_size(dtype, n_cols));
    for (int64_t col = 0; col < n_cols; ++col) {
      require(std::isfinite(values[col]), "[quantize] row ", row, ", column ", col, " is ",
              values[col]);
    }
    for (int64_t col = 0; col < n_cols; col += layout.block_size) {
      if (!quantize(bytes, values + col, counts.data() + col)) {
        const float* largest =
            std::max_element(values + col, values + col + layout.block_size,
                             [](float a, float b) { return std::abs(a) < std::abs(b); });
        throw InvalidArgument(concat("[quantize] row ", row, ", column ", largest - values, " is ",
                                     *largest, ", too large for ", layout.name));
      }
      bytes += layout.block_bytes;
    }
  };

  const int64_t piece = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, n_cols));
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  int64_t failed_row = n_rows;
  std::exception_ptr error;
  const auto work = [&] {
    for (int64_t begin; (begin = next.fetch_add(piece)) < n_rows;) {
      for (int64_t row = begin; row < std::min(begin + piece, n_rows); ++row) {
        try {
          quantize_row(row);
        } catch (...) {
          // Keep the first error only.
          const std::lock_guard lock(mutex);
          if (row < failed_row) {
            failed_row = row;
            error = std::current_exception();
          }
          next.store(n_rows);
          return;
        }
      }
    }
  };
  {
    // their destructors wait; std::jthread is not available everywhere
    std::vector<std::future<void>> threads;
    const int64_t n_pieces = (n_rows + piece - 1) / piece;
    for (int64_t i = 1; i < std::min<int64_t>(n_threads, n_pieces); ++i) {
      threads.push_back(std::async(std::launch::async, work));
    }
    work();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace h2o
