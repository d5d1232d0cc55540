// Backend: the operations of a transformer, and memory. The contract of the project: the model is
// written once against it, and a back end knows nothing of the model.
//
// Matrices are row-major. `n` is the number of rows of the batch; activations are f32 [n, cols];
// weights are [out, in] in their stored type, biases and norms f32. An empty bias adds nothing.
// The same batch gives the same bits, every time; on the CPU they depend neither on the number of
// threads nor, row by row, on the other rows of the batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/batch.h"
#include "backend/largest.h"
#include "core/buffer.h"
#include "core/tensor.h"

namespace h2o {

struct KvView;

// How rotary position embedding pairs the first n_rot dimensions of a head: (2i, 2i + 1) or
// (i, i + n_rot / 2). The other dimensions pass through.
enum class RopeLayout { none, pairs, halves };

struct Rope {
  RopeLayout layout = RopeLayout::none;
  Tensor frequencies;   // [1, n_rot / 2] f32: radians per position
  float magnitude = 1;  // scales cosine and sine (YaRN's attention factor)

  int64_t n_rot() const { return 2 * frequencies.cols; }
};

// One of the products of a matrix x: y = x w.weight^T + w.bias.
struct Product {
  Tensor y;
  const Affine& w;
};

// One attention: out [n, n_heads * head_dim] from q like it, k and v [n, n_kv_heads * head_dim].
// q and k come unrotated and are not to be read afterwards.
struct Attention {
  Tensor out, q, k, v;
  Rope rope;           // of q and k; no layout: they are not rotated
  float scale;         // of the logits, usually 1 / sqrt(head_dim)
  int32_t window = 0;  // a row sees itself and the window - 1 tokens before it; 0: all. The policy
                       // of the cache keeps none beyond it.
  float softcap = 0;   // the logits become softcap * tanh(logit / softcap); 0: they do not
  Tensor sinks;   // [1, n_heads] f32: of each head a logit that joins every softmax, with no value;
                  // it takes a share of the attention that no token receives. Empty: none
  Tensor slopes;  // [1, n_heads] f32: logits fall by so much for each token of distance (ALiBi).
                  // Empty: they do not
};

// Where the rows of a batch go in a mixture of experts. Their copies lie one after another by
// expert: those of expert e in the rows [offsets[e], offsets[e + 1]) of n * n_used. In the back
// end's memory.
struct Routes {
  int32_t n_experts;
  int32_t n_used;    // experts of a row
  bool normalized;   // the weights of a row sum to `scale`, not to what all experts' would
  float scale;       // of the weights
  float* weights;    // [n, n_used]
  int32_t* places;   // [n, n_used] where the copies of a row lie
  int32_t* offsets;  // [n_experts + 1]
};

// What two products become together, `up` and `gate`.
enum class Gate {
  swiglu,          // gate / (1 + e^-gate) * up
  swiglu_clamped,  // (clamp(up, -7, 7) + 1) * g / (1 + e^(-1.702 g)), g = min(gate, 7): gpt-oss
  geglu,           // gelu_tanh(gate) * up
};

// Uploaded matrices are divided between rows that are multiples of this.
inline constexpr int32_t kRowGroup = 32;

// A copy from the host's memory to a back end's.
struct HostCopy {
  std::byte* to;
  const std::byte* from;
  size_t bytes;
};

// Is shown the rows x that a weight is about to be multiplied with.
using ProductObserver = std::function<void(const Tensor& weight, const Tensor& x)>;

// What a back end remembers of passes that it has run, so that it need not be told them again.
class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;  // e.g. "cpu (x86_64_v4, 2 threads)"

  // What the bits of results depend on, without how many threads there are: "cpu (x86_64_v4)".
  virtual std::string kernels() const { return name(); }

  // Is a row the same, bit for bit, whatever rows it is computed with?
  virtual bool rows_are_independent() const { return false; }

  // Zeroed memory. Throws OutOfMemory.
  virtual Buffer allocate(size_t bytes) = 0;

  // Zeroed memory of the host, which read() and write() reach fastest. Throws OutOfMemory.
  virtual Buffer allocate_host(size_t bytes) = 0;

  // Can weights be read where they are in the mapped file, rather than copied?
  virtual bool maps_weights() const = 0;

  // Are copies of weights of this size to be made? false where there is no room for them, or they
  // are not wanted, and weights can be read in place. Throws OutOfMemory, with the numbers, where
  // they cannot.
  virtual bool expect_weights(size_t bytes) = 0;

  // Bytes of the copy that upload() makes of a tensor; 0 where it is as well read in place.
  virtual size_t upload_bytes(const Tensor& host) const = 0;

  // The tensor as this back end computes on it: a copy at `to`, of so many bytes of its memory or
  // of allocate_host(), in an order of its own, of which ranges of rows begin at multiples of
  // kRowGroup; or itself, where that is nullptr and weights can be read in place. Several tensors
  // may take rope_table at one `to`; places must not overlap otherwise.
  virtual Tensor upload(const Tensor& host, std::byte* to) = 0;

  // The same in memory of its own, which `owner` gets.
  Tensor upload(const Tensor& host, std::vector<Buffer>& owner) {
    const size_t bytes = upload_bytes(host);
    if (bytes > 0) owner.push_back(allocate(bytes));
    return upload(host, bytes > 0 ? owner.back().data() : nullptr);
  }

  // Copies between this back end's memory and the host's.
  virtual void read(void* host, const void* device, size_t bytes) = 0;
  virtual void write(void* device, const void* host, size_t bytes) = 0;

  // Copies from memory of allocate_host() while operations go on: it begins when those asked for so
  // far have ended, and returns before. Not in a pass that is recorded.
  virtual void copy_async(std::span<const HostCopy> copies) = 0;

  // What is asked for from now on begins when those copies have ended.
  virtual void await_copies() = 0;

  // Waits until all that was asked for has ended: then the host may use memory of allocate_host()
  // that operations read or write.
  virtual void finish() {}

  // Makes the content of `batch` known to the operations, and runs `pass`, which are to use it.
  virtual void run(const Batch& batch, const std::function<void()>& pass) = 0;

  // The same for passes that are repeated: those run with one graph, which is the caller's,
  // differ in nothing but their batch.
  virtual void run(const Batch& batch, std::unique_ptr<CapturedGraph>& graph,
                   const std::function<void()>& pass) = 0;

  // Calls body(i) for each i below n, on the threads that this back end has on the host, and waits.
  // `body` must not throw. Between passes only.
  virtual void parallel_for(int64_t n, const std::function<void(int64_t i)>& body) {
    for (int64_t i = 0; i < n; ++i) body(i);
  }

  // x[i] = table[batch.tokens[i]]
  virtual void embed(Tensor x, const Tensor& table, const Batch& batch) = 0;

  // x[i] += table[batch.positions[i]]: learned positions.
  virtual void add_positions(Tensor x, const Tensor& table, const Batch& batch) = 0;

  // y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, row by row; y may be x. The bias
  // must be there.
  virtual void layer_norm(Tensor y, const Tensor& x, const Affine& norm, float eps) = 0;

  // y = x / sqrt(mean(x^2) + eps) * weight, row by row; y may be x.
  virtual void rms_norm(Tensor y, const Tensor& x, const Tensor& weight, float eps) = 0;

  // Of each product y = x w.weight^T + w.bias, to the same bits as alone. Weights may be read
  // before earlier operations of the pass have ended: none of these may write them.
  virtual void matmul(std::initializer_list<Product> products, const Tensor& x) = 0;
  void matmul(const Tensor& y, const Tensor& x, const Affine& w) { matmul({{y, w}}, x); }

  // Shows every product to `observer` from now on, or to none where it is empty. Throws
  // InvalidArgument where activations are not in the host's memory. Between passes only.
  virtual void observe(ProductObserver observer) = 0;

  // y += x w.weight^T + w.bias: a residual
  virtual void matmul_add(Tensor y, const Tensor& x, const Affine& w) = 0;

  // x = max(x, 0)
  virtual void relu(Tensor x) = 0;

  // x = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
  virtual void gelu_tanh(Tensor x) = 0;

  // x = x / 2 * (1 + erf(x / sqrt(2)))
  virtual void gelu_erf(Tensor x) = 0;

  // up = kind(gate, up)
  virtual void apply_gate(Gate kind, Tensor up, const Tensor& gate) = 0;

  // Of two products of x as of what matmul() would give, to the same bits. What gate.y has then is
  // not said.
  virtual void matmul_gated(Gate kind, const Product& up, const Product& gate, const Tensor& x) {
    matmul({up, gate}, x);
    apply_gate(kind, up.y, gate.y);
  }

  // y += x
  virtual void add(Tensor y, const Tensor& x) = 0;

  // x *= factor
  virtual void scale(Tensor x, float factor) = 0;

  // x = cap * tanh(x / cap)
  virtual void softcap(Tensor x, float cap) = 0;

  // Does attend() know Scoring::question?
  virtual bool scores_questions() const = 0;

  // Can K and V of attend() have this type of kv_dtypes()?
  virtual bool caches(DType dtype) const = 0;

  // Can attend() archive what it evicts in files, rather than in memory of allocate_host()?
  virtual bool recalls_from_files() const = 0;

  // Does attend() keep the counts and bounds of an archive's pages in memory of allocate() too, to
  // read them there?
  virtual bool copies_summaries() const { return false; }

  // Chooses the experts of each row, those of the largest logits [n, n_experts], of equals the
  // first; their weights are the softmax of the logits, which are lost. Fills in the arrays.
  virtual void route(const Routes& routes, Tensor logits) = 0;

  // y [n * n_used, cols] = the copies of the rows of x
  virtual void dispatch(Tensor y, const Tensor& x, const Routes& routes) = 0;

  // Of each product y = x w.weight[e]^T + w.bias[e] for the copies x of each expert e; w.weight
  // [n_experts * y.cols, x.cols] has the matrices of the experts one after another, w.bias
  // [n_experts, y.cols]. Those that were not chosen are not read.
  virtual void matmul_experts(std::initializer_list<Product> products, const Tensor& x,
                              const Routes& routes) = 0;

  // y[i] += sum_j weights[i, j] * x[places[i, j]]
  virtual void combine_add(Tensor y, const Tensor& x, const Routes& routes) = 0;

  // x[i] /= 1 + e^-gate[i], gate [n, 1]
  virtual void gate_rows(Tensor x, const Tensor& gate) = 0;

  // y[i] = x[batch.logits_rows[i]]
  virtual void gather(Tensor y, const Tensor& x, const Batch& batch) = 0;

  // tokens[i] = the index of the largest element of row i, of equals the first; NaNs are the least.
  virtual void argmax(int32_t* tokens, const Tensor& x) = 0;

  // largest[i] = those of row i of x, the logits of batch.logits_rows; only where it selects them,
  // as back ends do whose memory is far from the host.
  virtual bool selects_largest() const { return false; }
  virtual void select_largest(LargestLogits* /*largest*/, const Tensor& /*x*/, const Batch&) {}

  // Bytes of workspace that attend() needs for caches of this shape. Of the pointers only counts
  // which of them are null.
  virtual size_t attend_workspace(const KvView& shape) const = 0;

  // Rotate, store, attend, score, choose: for every segment and kv_head, the new rows join the
  // cache, every row attends to the kept tokens and to the rows of its segment up to itself, the
  // attention each token received is added to its score, and what no longer fits is evicted.
  //
  // Keys are stored rotated by their positions, but unrotated where the segment is rolling: then
  // they are rotated as they are read, by cache.rope_table of their ranks.
  virtual void attend(const Attention& attention, const KvView& cache, const Batch& batch) = 0;

  // rope_table [n, n_rot]: row p holds the n_rot / 2 cosines of position p, times the magnitude,
  // and then the sines.
  virtual void compute_rope_table(Tensor rope_table, const Rope& rope) = 0;

  // A sequence of `length` tokens begins to roll: what is stored of it becomes unrotated, up to
  // the rounding of the cache's type, and gets its ranks.
  virtual void roll(const KvView& cache, const Rope& rope, int32_t sequence, int32_t length) = 0;
};

}  // namespace h2o
