#include "cuda/matmul/matmul.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>

#include "core/error.h"
#include "cuda/matmul/cublas.h"
#include "cuda/matmul/dequantize.h"
#include "cuda/matmul/gemm.h"
#include "cuda/matmul/gemm_narrow.h"
#include "cuda/matmul/matvec.h"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/matmul/repack.h"
#include "cuda/matmul/weights.h"

namespace h2o::cuda {
namespace {

// With more rows than this, unpacking quantized weights, as f16 for cuBLAS or in gemm(), takes less
// time than it saves.
constexpr int64_t kNarrowRows = 96;

constexpr int64_t kRoundedRows = 64;               // rows of x at a time, in 8 bits
constexpr int64_t kGemmRows = 2048;                // rows of x at a time, in 16 bits
constexpr int64_t kTileBytes = int64_t{32} << 20;  // of unpacked weights: smaller than the L2 cache
constexpr int64_t kTileRows = 256;  // a multiple of them: cuBLAS's own tiles are whole

// Returns at most n rows, from row `begin`.
Tensor rows_of(const Tensor& x, int64_t begin, int64_t n) {
  return {x.row(begin), x.dtype, std::min(n, x.rows - begin), x.cols};
}

// Rows of quantized weights that are unpacked at a time.
int64_t rows_of_tile(int64_t cols) {
  return std::max(kTileBytes / (2 * cols * kTileRows), int64_t{1}) * kTileRows;
}

// `w` has as many rows as y has columns: those of the first expert, if there are experts.
DeviceProduct product_of(const Product& product, Weights w) {
  const Tensor& y = product.y;
  const Affine& affine = product.w;
  w.rows = y.cols;
  return {y.floats(), affine.bias ? affine.bias.floats() : nullptr, w};
}

// Memory that grows. Graphs captured before keep using the smaller buffer, which is not freed.
class Workspace {
 public:
  void reserve(int64_t bytes) {
    const auto needed = static_cast<size_t>(bytes);
    if (buffers_.empty() || buffers_.back().size() < needed) {
      buffers_.push_back(allocate_device(needed));
    }
  }
  std::byte* data() const { return buffers_.back().data(); }

 private:
  std::vector<Buffer> buffers_;
};

// Activations in another type, and the tensor they were converted from.
struct OtherForm {
  Workspace memory;
  Tensor x;
  DType dtype = DType::f32;

  // Returns true if the conversion must be performed.
  bool becomes(const Tensor& tensor, DType as) {
    if (x.data == tensor.data && x.rows == tensor.rows && x.cols == tensor.cols && dtype == as) {
      return false;
    }
    x = tensor;
    dtype = as;
    return true;
  }
  void forget() { x = {}; }
  void forget_if_in(const Tensor& y) {
    if (x && x.data < y.data + y.bytes() && y.data < x.data + x.bytes()) forget();
  }
};

}  // namespace

struct Matmul::State {
  explicit State(const Stream& stream) : stream(stream), cublas(stream), uploader(stream) {}

  Tensor upload(const Tensor& host, std::byte* to);
  Weights find(const Tensor& tensor) const;
  void multiply(std::span<const Product> products, const Tensor& x, bool add,
                const Routes* routes = nullptr);
  bool takes_matvecs(const Weights& w, int64_t n_rows, bool experts) const;
  bool takes_cublas(const Weights& w, int64_t n_rows) const;
  void matvecs(std::span<const DeviceProduct> products, const Tensor& x, MatvecRows rows);
  const void* factors(const Tensor& x, DType type);
  void own_gemm(const DeviceProduct& product, const Tensor& x, bool add);
  void experts_gemm(const DeviceProduct& product, const Tensor& x, const ExpertRows& experts);
  void cublas_gemm(const DeviceProduct& product, const Tensor& x, bool add);
  void forget_if_in(const Tensor& y);
  void forget();

  // Operations on activations are between begin() and end(). Any other one that was enqueued since
  // the last end() may have written the tensors of `quantized` and `halves`.
  void begin() {
    if (stream.n_uses() != n_uses) forget();
  }
  void end() { n_uses = stream.n_uses(); }

  const Stream& stream;
  Cublas cublas;
  Uploader uploader;
  std::map<const std::byte*, Tensor> uploaded;  // keyed by address
  std::set<int64_t> quantized_cols;             // their numbers of columns
  std::map<int64_t, DType> half_types;          // of operands, by the number of columns
  OtherForm quantized;                          // kRoundedRows rows as QuantizedRows, in 8 bits
  OtherForm halves;                             // kGemmRows rows, as f16 or bf16
  Workspace tile;                               // weights as f16
  Buffer narrow_sums;                           // gemm_narrow_workspace()
  bool alone = false;                           // see compute_alone()
  uint64_t n_uses = 0;                          // of the stream, at the last end()
};

Tensor Matmul::State::upload(const Tensor& host, std::byte* to) {
  const int64_t bytes = host.rows * device_row_bytes(host.dtype, host.cols);
  const Tensor tensor{to, host.dtype, host.rows, host.cols};
  uploader.upload(tensor.data, host);

  if (is_quantized(host.dtype)) {
    // Previous tensors in this range were freed, or share it as streamed layers with the same
    // layout.
    uploaded.erase(uploaded.lower_bound(tensor.data), uploaded.lower_bound(tensor.data + bytes));
    uploaded[tensor.data] = tensor;
    quantized_cols.insert(tensor.cols);
    quantized.memory.reserve(QuantizedRows::bytes(kRoundedRows, host.cols));
    if (cublas) tile.reserve(2 * host.cols * rows_of_tile(host.cols));
    if (narrow_sums.size() == 0) {
      narrow_sums = allocate_device(gemm_narrow_workspace(stream));
      check(cudaMemsetAsync(narrow_sums.data(), 0, narrow_sums.size(), stream.get()), "upload");
    }
  }
  if (host.dtype != DType::f32) {
    halves.memory.reserve(kGemmRows * host.cols * 2);
    half_types[host.cols] = gemm_factors(host.dtype);
  }
  return tensor;
}

// Row ranges of an uploaded tensor are addressed as if its rows had their length in the file.
Weights Matmul::State::find(const Tensor& t) const {
  if (!is_quantized(t.dtype)) return {t.data, t.dtype, t.rows, t.cols, t.row_bytes()};
  auto whole = uploaded.upper_bound(t.data);
  require(whole != uploaded.begin(), "[matmul] these weights were not uploaded");
  const std::byte* const begin = (--whole)->first;
  const int64_t row_bytes = device_row_bytes(t.dtype, t.cols);
  return {begin + (t.data - begin) / t.row_bytes() * row_bytes, t.dtype, t.rows, t.cols, row_bytes};
}

// cuBLAS cannot be used if the host does not know the rows: those of experts.
bool Matmul::State::takes_matvecs(const Weights& w, int64_t n_rows, bool experts) const {
  return n_rows <= kMatvecRows || !((cublas && !experts) || gemm_takes(w));
}

// Tens of rows with MXFP4 weights, which gemm_narrow() does not take: unpacked once by gemm().
bool Matmul::State::takes_cublas(const Weights& w, int64_t n_rows) const {
  return cublas && (w.dtype != DType::mxfp4 || n_rows > kNarrowRows);
}

// `rows` describes all rows; its range is set here.
void Matmul::State::matvecs(std::span<const DeviceProduct> products, const Tensor& x,
                            MatvecRows rows) {
  const bool rounds = is_quantized(products.front().w.dtype);
  const int64_t together = alone && !rounds ? kSameOrderRows : kMatvecRows;
  const int64_t most = !rows.experts ? together : rounds ? kRoundedRows : x.rows;
  rows.alone = alone;
  for (int64_t i = 0; i < x.rows; i += most) {
    const Tensor some = rows_of(x, i, most);
    rows.begin = i;
    rows.n = some.rows;
    if (!rounds) {
      matvec(stream, products, rows, some.floats());
      continue;
    }
    const QuantizedRows all(quantized.memory.data(), kRoundedRows, x.cols);
    if (quantized.becomes(some, DType::q8_0)) quantize_rows(stream, all, some);
    matvec(stream, products, rows, all);
  }
}

// At most kGemmRows rows, converted for tensor cores.
const void* Matmul::State::factors(const Tensor& x, DType type) {
  if (type == DType::f32) return x.data;
  if (halves.becomes(x, type)) convert(stream, halves.memory.data(), type, x);
  return halves.memory.data();
}

void Matmul::State::own_gemm(const DeviceProduct& product, const Tensor& x, bool add) {
  for (int64_t i = 0; i < x.rows; i += kGemmRows) {
    const Tensor some = rows_of(x, i, kGemmRows);
    gemm(stream, product.from(i), factors(some, gemm_factors(product.w.dtype)), some.rows, add);
  }
}

void Matmul::State::experts_gemm(const DeviceProduct& product, const Tensor& x,
                                 const ExpertRows& experts) {
  for (int64_t i = 0; i < x.rows; i += kGemmRows) {
    const Tensor some = rows_of(x, i, kGemmRows);
    gemm_experts(stream, product, factors(some, gemm_factors(product.w.dtype)), i, some.rows,
                 experts);
  }
}

void Matmul::State::cublas_gemm(const DeviceProduct& product, const Tensor& x, bool add) {
  const auto& [y, bias, w] = product;
  const DType type = is_quantized(w.dtype) ? DType::f16 : w.dtype;
  const int64_t of_tile = is_quantized(w.dtype) ? rows_of_tile(w.cols) : w.rows;
  // Rows are outside, although quantized weights are then unpacked for each kGemmRows: otherwise
  // all rows would have to be converted first, up to 65,536 of them.
  for (int64_t i = 0; i < x.rows; i += kGemmRows) {
    const Tensor some = rows_of(x, i, kGemmRows);
    const void* const from = factors(some, type);
    for (int64_t o = 0; o < w.rows; o += of_tile) {
      const int64_t n_out = std::min(of_tile, w.rows - o);
      const void* weights = w.row(o);
      if (is_quantized(w.dtype)) {
        dequantize(stream, tile.data(), w, o, n_out);
        weights = tile.data();
      }
      float* const to = y + i * w.rows + o;
      if (bias != nullptr && cublas.multiply_biased(to, w.rows, from, weights, type, some.rows,
                                                    n_out, w.cols, bias + o, add)) {
        continue;
      }
      if (bias != nullptr) start_with_bias(stream, to, w.rows, some.rows, bias + o, n_out, add);
      cublas.multiply(to, w.rows, from, weights, type, some.rows, n_out, w.cols,
                      add || bias != nullptr);
    }
  }
}

// With `routes`, x has the copies of rows for the experts.
void Matmul::State::multiply(std::span<const Product> products, const Tensor& x, bool add,
                             const Routes* routes) {
  if (x.rows == 0) return;
  begin();
  MatvecRows rows{.begin = 0, .n = x.rows, .add = add, .gate = {}, .experts = {}};
  if (routes != nullptr) rows.experts = ExpertRows{routes->offsets, routes->n_experts};
  const int64_t n_rows = routes != nullptr ? x.rows / routes->n_used : x.rows;
  for (size_t i = 0; i < products.size();) {
    const DType dtype = products[i].w.weight.dtype;
    const bool narrow = routes == nullptr && n_rows > kMatvecRows && n_rows <= kNarrowRows &&
                        gemm_narrow_takes(dtype);
    std::array<DeviceProduct, kMaxProducts> together{};
    size_t n = 0;
    for (; n < together.size() && i < products.size() && products[i].w.weight.dtype == dtype; ++i) {
      const DeviceProduct product = product_of(products[i], find(products[i].w.weight));
      if (narrow || takes_matvecs(product.w, n_rows, routes != nullptr)) {
        together[n++] = product;
      } else if (routes != nullptr) {
        experts_gemm(product, x, *rows.experts);
      } else if (takes_cublas(product.w, n_rows)) {
        cublas_gemm(product, x, add);
      } else {
        own_gemm(product, x, add);
      }
    }
    if (n == 0) continue;
    if (narrow) {
      gemm_narrow(stream, {together.data(), n}, factors(x, DType::f16), x.rows, add,
                  narrow_sums.data());
    } else {
      matvecs({together.data(), n}, x, rows);
    }
  }
  for (const Product& product : products) forget_if_in(product.y);
  end();
}

void Matmul::State::forget_if_in(const Tensor& y) {
  quantized.forget_if_in(y);
  halves.forget_if_in(y);
}

void Matmul::State::forget() {
  quantized.forget();
  halves.forget();
}

Matmul::Matmul(const Stream& stream) : state_(std::make_unique<State>(stream)) {}

Matmul::~Matmul() = default;

std::string Matmul::name() const { return state_->cublas.name(); }

Tensor Matmul::upload(const Tensor& host, std::byte* to) { return state_->upload(host, to); }

void Matmul::compute_alone(bool alone) { state_->alone = alone; }

void Matmul::multiply(std::span<const Product> products, const Tensor& x, bool add) {
  state_->multiply(products, x, add);
}

void Matmul::multiply_experts(std::span<const Product> products, const Tensor& x,
                              const Routes& routes) {
  state_->multiply(products, x, false, &routes);
}

bool Matmul::multiply_gated(Gate kind, const Product& up, const Product& gate, const Tensor& x) {
  const Weights weights[] = {state_->find(up.w.weight), state_->find(gate.w.weight)};
  for (const Weights& w : weights) {
    if (is_quantized(w.dtype) || !state_->takes_matvecs(w, x.rows, false)) return false;
  }
  if (weights[0].dtype != weights[1].dtype) return false;
  const DeviceProduct both[] = {product_of(up, weights[0]), product_of(gate, weights[1])};
  state_->begin();
  state_->matvecs(both, x, {.begin = 0, .n = x.rows, .add = false, .gate = kind, .experts = {}});
  state_->forget_if_in(up.y);
  state_->end();
  return true;
}

void Matmul::embed(Tensor x, const Tensor& table, const int32_t* tokens) {
  if (x.rows > 0) cuda::embed(state_->stream, x, state_->find(table), tokens);
}

Matmul::NextOperands Matmul::operands(const Tensor& y, bool rounds) {
  state_->forget();
  Operands to;
  if (y.rows > kMatvecRows && y.rows <= kGemmRows) {
    const auto type = state_->half_types.find(y.cols);
    if (type != state_->half_types.end() && y.cols % 4 == 0) {
      state_->halves.becomes(y, type->second);
      to.halves = reinterpret_cast<uint16_t*>(state_->halves.memory.data());
      to.bf16 = type->second == DType::bf16;
    }
  } else if (y.rows > 0 && y.rows <= kMatvecRows && rounds &&
             state_->quantized_cols.contains(y.cols)) {
    state_->quantized.becomes(y, DType::q8_0);
    to.rounded = {state_->quantized.memory.data(), kRoundedRows, y.cols};
  }
  return {*state_, to};
}

Matmul::NextOperands::~NextOperands() { state_.end(); }

}  // namespace h2o::cuda
