// Backend: transformer operations and memory management. The model is written once against this
// interface; back ends know nothing about the model.
//
// Matrices are row-major. `n` is the number of rows of the batch; activations are f32 [n, cols];
// weights are [out, in] in their stored type; biases and norms are f32. An empty bias adds nothing.
// Results are deterministic: the same batch gives the same bits every time. On the CPU they do not
// depend on the number of threads, nor does a row depend on the other rows of the batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/batch.h"
#include "backend/largest_logits.h"
#include "backend/recurrent_limits.h"
#include "core/buffer.h"
#include "core/tensor.h"

namespace h2o {

class KvJournal;
struct KvView;
struct Retraction;

// How rotary position embedding pairs the first n_rot dimensions of a head: (2i, 2i + 1) or (i, i +
// n_rot / 2). The remaining dimensions are not rotated.
enum class RopeLayout { none, pairs, halves };

struct Rope {
  RopeLayout layout = RopeLayout::none;
  Tensor frequencies;   // [1, n_rot / 2] f32: radians per position
  float magnitude = 1;  // scales cosine and sine (YaRN's attention factor)

  int64_t n_rot() const { return 2 * frequencies.cols; }
};

// One matrix product: y = x w.weight^T + w.bias. Of several experts, e has the y.cols rows of `w`
// from first + e * stride on.
struct Product {
  Tensor y;
  const Affine& w;
  int64_t first = 0;
  int64_t stride = 0;  // 0: y.cols

  int64_t row(int64_t e) const { return first + e * (stride > 0 ? stride : y.cols); }
};

// One attention operation: out and q [n, n_heads * head_dim], k and v [n, n_kv_heads * head_dim].
// q and k are passed unrotated; their contents are unspecified afterwards. Without k and v, the
// rows attend to the keys and values that an earlier layer of this pass stored in the cache.
struct Attention {
  Tensor out, q, k, v;
  Rope rope;           // of q and k; RopeLayout::none: not rotated
  float scale;         // of the logits, usually 1 / sqrt(head_dim)
  int32_t window = 0;  // a row attends to itself and the window - 1 tokens before it; 0: unlimited.
                       // The cache's policy keeps only the newest tokens, at most window - 1.
  bool in_blocks = false;  // instead, to those of its block of `window` positions, up to itself.
                           // Requires block_windows
  float softcap = 0;       // logits become softcap * tanh(logit / softcap); 0: disabled
  Tensor sinks;   // [1, n_heads] f32: one extra logit per head in every softmax, without a value
                  // (attention sinks). Empty: none
  Tensor slopes;  // [1, n_heads] f32: subtracted from a logit per token of distance (ALiBi). Empty:
                  // none
  bool allow_bf16 = false;  // factors may be rounded to bf16, where that is faster
  bool evicts = true;       // tokens over the budget, afterwards; false before the last of several
                            // layers that read the cache
};

// One layer of Gated DeltaNet (arXiv 2412.06464): linear attention with a state S [head_dim,
// head_dim] per value head. For each row of a sequence, in order,
//
//   q, k, v = silu(the last n_taps rows of qkv, weighted by conv channel by channel)
//   S = d S + k (beta (v - d S^T k))^T,  out = S^T q
//   d = e^(a * softplus(alpha + dt_bias)),  beta = sigmoid(beta)
//
// with q and k of length 1, q then divided by sqrt(head_dim). Value head i reads the q and k of
// head k_head(i). f32; the contents of qkv, alpha and beta are unspecified afterwards.
struct DeltaNet {
  Tensor out;      // [n, n_v_heads * head_dim]
  Tensor qkv;      // [n, (2 * n_k_heads + n_v_heads) * head_dim]
  Tensor alpha;    // [n, n_v_heads]
  Tensor beta;     // [n, n_v_heads]
  Tensor conv;     // [n_taps, qkv.cols], the current row's weight last
  Tensor a;        // [1, n_v_heads] negative
  Tensor dt_bias;  // [1, n_v_heads]
  int32_t n_k_heads;
  int32_t n_v_heads;
  int32_t head_dim;       // a multiple of kDeltaColumns, at most kMaxDeltaHead
  bool adjacent = false;  // value heads that share a head of q and k are adjacent

  int32_t k_head(int32_t v_head) const {
    return adjacent ? v_head / (n_v_heads / n_k_heads) : v_head % n_k_heads;
  }

  // Floats of a sequence's state: S of each value head, [head_dim / kDeltaColumns, head_dim,
  // kDeltaColumns]; then the last n_taps - 1 rows of qkv, oldest first.
  int64_t matrix_floats() const { return int64_t{n_v_heads} * head_dim * head_dim; }
};

// One layer of gated short convolutions (LFM2). bcx has three parts b, c and x of the width of out;
// for each row of a sequence, channel by channel,
//
//   out = c * (the last n_taps rows of b * x, weighted by conv)
//
// f32. A sequence's state is the last n_taps - 1 rows of b * x, oldest first.
struct ShortConv {
  Tensor out;   // [n, width]
  Tensor bcx;   // [n, 3 * width]
  Tensor conv;  // [n_taps, width], the current row's weight last
};

// One layer of a state-space model whose decay is a number per head (Mamba-2, arXiv 2405.21060),
// with a state S [d_state, head_dim] per head. For each row of a sequence, in order,
//
//   x, b, c = silu(the last n_taps rows of xbc, weighted by conv channel by channel, + conv_bias)
//   S = e^(a t) S + b (t x)^T,  out = (S^T c + d x) * silu(gate),  t = softplus(dt + dt_bias)
//
// Then n_groups equal parts of out are normalized as by rms_norm(), if there is a norm. Heads of
// one of n_groups equal groups share b and c. f32; the contents of xbc, dt and decay are
// unspecified afterwards.
struct StateSpace {
  Tensor out;        // [n, n_heads * head_dim]
  Tensor gate;       // [n, n_heads * head_dim]
  Tensor xbc;        // [n, n_heads * head_dim + 2 * n_groups * d_state]
  Tensor dt;         // [n, n_heads]
  Tensor decay;      // [n, n_heads] workspace
  Tensor conv;       // [n_taps, xbc.cols], the current row's weight last
  Tensor conv_bias;  // [1, xbc.cols], or empty
  Tensor a;          // n_heads numbers, negative
  Tensor d;          // n_heads numbers
  Tensor dt_bias;    // [1, n_heads]
  Tensor norm;       // [n_groups, n_heads * head_dim / n_groups], or empty
  float norm_eps;
  int32_t n_heads;
  int32_t head_dim;  // a multiple of kDeltaColumns
  int32_t n_groups;
  int32_t d_state;  // at most kMaxStateSize

  // Floats of a sequence's state: S of each head, [head_dim / kDeltaColumns, d_state,
  // kDeltaColumns]; then the last n_taps - 1 rows of xbc, oldest first.
  int64_t matrix_floats() const { return int64_t{n_heads} * head_dim * d_state; }
};

// How the rows of a batch are routed in a mixture of experts. Each row is copied once per expert it
// uses, and the copies are grouped by expert: expert e has rows [offsets[e], offsets[e + 1]) of n *
// n_used. The arrays are in the back end's memory.
struct Routes {
  static constexpr int32_t kMaxGroups = 32;

  int32_t n_experts;
  int32_t n_used;        // experts per row
  bool sigmoid = false;  // an expert's score is the sigmoid of its logit, not the softmax of all
  // SparseMixer (arXiv 2409.12136) if positive: an expert's score is its softmax among the experts
  // that are not chosen before it, without those whose logit l is far below its own, L:
  // (L - l) / max(|l|, L) > spread. Requires block_windows
  float spread = 0;
  int32_t n_groups = 1;       // experts are in groups of equal size, at most kMaxGroups,
  int32_t n_groups_used = 1;  // of which a row uses these many
  bool normalized;  // the weights of a row sum to `scale`; otherwise they are the scores times it
  float scale;      // of the weights
  const float* expert_scales =
      nullptr;                 // [n_experts] factors of the weights of each; nullptr: none
  bool scales_inputs = false;  // weights are factors of the experts' inputs, in dispatch(), instead
                               // of their outputs, in combine_add(). Requires block_windows
  float* weights;              // [n, n_used]
  int32_t* copy_rows;          // [n, n_used] index of each copy of a row
  int32_t* offsets;            // [n_experts + 1]; nullptr, for matmul_experts() where
                               // shared_values are supported: the experts have equally many rows
};

// Where each of several heads of several rows begins.
struct Heads {
  float* first;
  int64_t row_step;   // floats between rows
  int64_t head_step;  // floats between heads
};

// The parameters of Backend::xielu().
struct Xielu {
  float alpha_p, alpha_n, beta, eps;
};

// How the products `up` and `gate` are combined.
enum class Gate {
  swiglu,          // gate / (1 + e^-gate) * up
  swiglu_clamped,  // (clamp(up, -7, 7) + 1) * g / (1 + e^(-1.702 g)), g = min(gate, 7): gpt-oss
  geglu,           // gelu_tanh(gate) * up
  sigmoid,         // up / (1 + e^-gate)
};

// The largest head of attend_whole().
inline constexpr int64_t kMostWholeHead = 256;

// Uploaded matrices may be split at rows that are multiples of this.
inline constexpr int32_t kRowGroup = 32;

// A copy from host memory to the back end's memory.
struct HostCopy {
  std::byte* to;
  const std::byte* from;
  size_t bytes;
};

// Receives the input rows x of a product with `weight` before it is computed.
using ProductObserver = std::function<void(const Tensor& weight, const Tensor& x)>;

// A captured sequence of operations that can be replayed without issuing them again.
class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
};

// Offers of a back end beyond the operations that all implement.
struct Capabilities {
  std::vector<DType> kv_dtypes;    // of K and V, in the cache or in an archive, for attend()
  int32_t max_head_dim = 1 << 30;  // of attend()
  int32_t max_experts = 1 << 30;   // of route()
  bool independent_rows = false;   // a row's result does not depend, bit for bit, on other rows;
                                   // a batch may have several segments of a sequence, for attend()
  bool mapped_weights = false;     // weights can be read in place from the mapped file
  bool observed_products = false;  // observe() is supported
  bool largest_logits = false;     // select_largest() is supported: memory is not host memory
  bool shared_values = false;      // attend() supports KvShape::shared_values
  bool archives = false;           // attend() can archive tokens
  bool archive_files = false;      // and can do so in files, not only in memory of
                                   // allocate_host()
  int32_t draft_rows = 0;          // most rows of a batch with several turns, each of which is,
                                   // bit for bit, as if computed alone; 0: not supported
  bool state_spaces = false;       // state_space() is supported
  bool divided_experts = false;    // matmul_experts() supports Product::first
  bool whole_texts = false;        // attend_whole() and multiply() are supported
  bool block_windows = false;      // Attention::in_blocks, Routes::scales_inputs and spread
  bool copied_summaries = false;   // attend() keeps the counts and bounds of archived pages also in
                                   // memory of allocate(), and reads them there
  int32_t n_batch = 512;           // rows of a pass that use the device well

  bool caches(DType dtype) const { return std::ranges::find(kv_dtypes, dtype) != kv_dtypes.end(); }
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;  // e.g. "cpu (x86_64_v4, 2 threads)"

  // The part of name() that results depend on, bit for bit; without the thread count: "cpu
  // (x86_64_v4)".
  virtual std::string kernels() const { return name(); }

  // Constant.
  virtual const Capabilities& capabilities() const = 0;

  // Zeroed memory. Throws OutOfMemory.
  virtual Buffer allocate(size_t bytes) = 0;

  // The same, for memory of which every part will be used.
  virtual Buffer allocate_whole(size_t bytes) { return allocate(bytes); }

  // Zeroed host memory from which transfers are fastest (pinned for CUDA). Throws OutOfMemory.
  virtual Buffer allocate_host(size_t bytes) = 0;

  // True if copies of `bytes` bytes of weights should be made; false if they do not fit or are not
  // wanted and weights can be read in place. Throws OutOfMemory with the numbers if they do not fit
  // and cannot be read in place.
  virtual bool expect_weights(size_t bytes) = 0;

  // Size of the copy that upload() makes of a tensor; 0 if it can be read in place just as well.
  virtual size_t upload_bytes(const Tensor& host) const = 0;

  // Prepares a tensor for this back end. Copies it to `to` (upload_bytes() bytes of this back end's
  // memory or of allocate_host()), possibly in a different layout, in which row ranges may begin at
  // multiples of kRowGroup. With `to` == nullptr, returns the tensor itself where weights can be
  // read in place. Destinations must be either identical or disjoint: tensors that are used at
  // different times may share one.
  virtual Tensor upload(const Tensor& host, std::byte* to) = 0;

  // The same, with memory appended to `owner`.
  Tensor upload(const Tensor& host, std::vector<Buffer>& owner) {
    const size_t bytes = upload_bytes(host);
    if (bytes > 0) owner.push_back(allocate(bytes));
    return upload(host, bytes > 0 ? owner.back().data() : nullptr);
  }

  // Copies between this back end's memory and host memory.
  virtual void read(void* host, const void* device, size_t bytes) = 0;
  virtual void write(void* device, const void* host, size_t bytes) = 0;

  // Starts copies from memory of allocate_host() that overlap with computation: they begin after
  // all operations enqueued so far, and the call returns immediately. Not allowed during graph
  // capture.
  virtual void copy_async(std::span<const HostCopy> copies) = 0;

  // Operations enqueued after this call wait for those copies.
  virtual void await_copies() = 0;

  // Waits for all enqueued operations. Afterwards the host may access memory of allocate_host()
  // that they read or write.
  virtual void finish() {}

  // Makes `batch` available to the operations, then calls `pass`, which enqueues them.
  virtual void run(const Batch& batch, const std::function<void()>& pass) = 0;

  // Runs a repeated pass: captures it into `graph`, or replays it. Passes that share a
  // graph may differ only in their batch.
  virtual void run(const Batch& batch, std::unique_ptr<CapturedGraph>& graph,
                   const std::function<void()>& pass) = 0;

  // Calls body(i) for each i < n on this back end's host threads, and waits. `body` must not throw.
  // Must not be called during a pass.
  virtual void parallel_for(int64_t n, const std::function<void(int64_t i)>& body) {
    for (int64_t i = 0; i < n; ++i) body(i);
  }

  // x[i] = table[batch.tokens[i]]
  virtual void embed(Tensor x, const Tensor& table, const Batch& batch) = 0;

  // x[i] += table[batch.positions[i]]: learned positions.
  virtual void add_positions(Tensor x, const Tensor& table, const Batch& batch) = 0;

  // x[i] *= 1 + scale * ln(1 + floor((batch.positions[i] + offset) / length)): queries of long
  // contexts.
  virtual void scale_by_position(Tensor x, float scale, int32_t length, int32_t offset,
                                 const Batch& batch) = 0;

  // Rotates the heads of q and k [n, n_heads * head_dim] by batch.positions, for models that change
  // them afterwards; otherwise attend() does.
  virtual void rotate(Tensor q, Tensor k, int64_t head_dim, const Rope& rope,
                      const Batch& batch) = 0;

  // x = min(max(x, -limit), limit)
  virtual void clamp(Tensor x, float limit) = 0;

  // y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, row by row; y may alias x. The bias is
  // required.
  virtual void layer_norm(Tensor y, const Tensor& x, const Affine& norm, float eps) = 0;

  // y = x / sqrt(mean(x^2) + eps) * weight, row by row; y may alias x.
  virtual void rms_norm(Tensor y, const Tensor& x, const Tensor& weight, float eps) = 0;

  // Each product y = x w.weight^T + w.bias, bit-identical to computing it alone. Weights may be
  // read before earlier operations of the pass complete, so operations must not write them.
  virtual void matmul(std::initializer_list<Product> products, const Tensor& x) = 0;
  void matmul(const Tensor& y, const Tensor& x, const Affine& w) { matmul({{y, w}}, x); }

  // Calls `observer` for every product from now on; an empty function disables it. Requires
  // observed_products. Not allowed during a pass.
  virtual void observe(ProductObserver /*observer*/) {}

  // y += x w.weight^T + w.bias: a residual
  virtual void matmul_add(Tensor y, const Tensor& x, const Affine& w) = 0;

  // x = max(x, 0)
  virtual void relu(Tensor x) = 0;

  // x = max(x, 0)^2
  virtual void relu_squared(Tensor x) = 0;

  // x = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
  virtual void gelu_tanh(Tensor x) = 0;

  // x = x / 2 * (1 + erf(x / sqrt(2)))
  virtual void gelu_erf(Tensor x) = 0;

  // x = beta x + (x > 0 ? alpha_p x^2 : alpha_n (e^min(x, eps) - 1 - x)): xIELU, arXiv 2411.13010
  virtual void xielu(Tensor x, const Xielu& f) = 0;

  // up = kind(gate, up)
  virtual void apply_gate(Gate kind, Tensor up, const Tensor& gate) = 0;

  // Equivalent, bit for bit, to matmul({up, gate}, x) followed by apply_gate(). Leaves gate.y
  // unspecified.
  virtual void matmul_gated(Gate kind, const Product& up, const Product& gate, const Tensor& x) {
    matmul({up, gate}, x);
    apply_gate(kind, up.y, gate.y);
  }

  // a, b [n, m] = the even and the odd blocks of `width` columns of x [n, 2 m]
  virtual void split_blocks(Tensor a, Tensor b, const Tensor& x, int64_t width) = 0;

  // Copies the first `width` floats of each head of each row. `to` and `from` are disjoint.
  virtual void copy_heads(const Heads& to, const Heads& from, int64_t n_rows, int64_t n_heads,
                          int64_t width) = 0;

  // y *= x. Requires whole_texts.
  virtual void multiply(Tensor /*y*/, const Tensor& /*x*/) {}

  // y += x
  virtual void add(Tensor y, const Tensor& x) = 0;

  // x *= factor
  virtual void scale(Tensor x, float factor) = 0;

  // x = cap * tanh(x / cap)
  virtual void softcap(Tensor x, float cap) = 0;

  // Selects the n_used experts with the largest scores of each row of logits [n, n_experts] (ties:
  // the lower index) and computes their weights from the scores. Fills in the arrays of `routes`;
  // overwrites `logits`. bias [1, n_experts], or empty, is added to the scores for the selection
  // only. With several groups, a row's experts are from the n_groups_used groups whose two largest
  // (biased) scores have the largest sum (ties: the lower index).
  virtual void route(const Routes& routes, Tensor logits, const Tensor& bias) = 0;

  // y [n * n_used, cols] = the copies of the rows of x
  virtual void dispatch(Tensor y, const Tensor& x, const Routes& routes) = 0;

  // For each product and each expert e: y = x w.weight[e]^T + w.bias[e] over the copies x routed to
  // e. w.weight [n_experts * stride, x.cols] holds the experts' matrices one after another, w.bias
  // is [n_experts, stride]. Experts without rows are not read.
  virtual void matmul_experts(std::initializer_list<Product> products, const Tensor& x,
                              const Routes& routes) = 0;

  // y[i] += sum_j weights[i, j] * x[copy_rows[i, j]]
  virtual void combine_add(Tensor y, const Tensor& x, const Routes& routes) = 0;

  // x[i] /= 1 + e^-gate[i], gate [n, 1]
  virtual void gate_rows(Tensor x, const Tensor& gate) = 0;

  // y[i] = x[batch.logits_rows[i]]
  virtual void gather(Tensor y, const Tensor& x, const Batch& batch) = 0;

  // tokens[i] = the index of the largest element of row i (ties: the lower index); NaN sorts below
  // every number.
  virtual void argmax(int32_t* tokens, const Tensor& x) = 0;

  // largest[i] = the largest logits of row i of x, row batch.logits_rows[i] of the batch. Requires
  // largest_logits.
  virtual void select_largest(LargestLogits* /*largest*/, const Tensor& /*x*/, const Batch&) {}

  // Bytes of workspace that attend() needs for caches of this shape. Pointers in `shape` are only
  // tested for null.
  virtual size_t attend_workspace(const KvView& shape) const = 0;

  // Rotate, store, attend, score, select victims. For every segment and kv_head: the new rows are
  // stored in the cache; each row attends to the kept tokens and to the rows of its segment up to
  // itself; the attention that each token received is added to its score; tokens over the budget
  // are evicted.
  //
  // Finite numbers that a cache's type cannot store are stored as the largest that it can.
  //
  // Keys are stored rotated by their positions. In rolling segments they are stored unrotated and
  // rotated when read, by cache.rope_table at their ranks.
  virtual void attend(const Attention& attention, const KvView& cache, const Batch& batch) = 0;

  // The number of such numbers so far; 0 where they are not counted.
  virtual int64_t n_clamped() const { return 0; }

  // Attention without a cache, both ways: each row attends to all rows of its segment, with a
  // window to those at a distance less than it; slopes count distances both ways. Heads have
  // head_dim <= kMostWholeHead dimensions. There is no softcap and there are no sinks. Requires
  // whole_texts.
  virtual void attend_whole(const Attention& /*attention*/, int64_t /*head_dim*/, const Batch&) {}

  // Undoes drafts in all layers. Requires draft_rows.
  virtual void retract(std::span<const KvView> /*layers*/, const KvJournal& /*journal*/,
                       const Retraction& /*drafts*/) {}

  // See DeltaNet; reads and updates the states of the batch's sequences, cache.states.
  virtual void delta_net(const DeltaNet& layer, const KvView& cache, const Batch& batch) = 0;

  // Computes a ShortConv, as above.
  virtual void short_conv(const ShortConv& layer, const KvView& cache, const Batch& batch) = 0;

  // Computes a StateSpace, as above. Requires state_spaces.
  virtual void state_space(const StateSpace& /*layer*/, const KvView& /*cache*/, const Batch&) {}

  // rope_table [n, n_rot]: row p holds the n_rot / 2 cosines of position p, times the magnitude,
  // followed by the sines.
  virtual void compute_rope_table(Tensor rope_table, const Rope& rope) = 0;

  // Switches a sequence of `length` tokens to rolling positions: un-rotates its stored keys, up to
  // the rounding of the cache's type, and computes their ranks.
  virtual void roll(const KvView& cache, const Rope& rope, int32_t sequence, int32_t length) = 0;
};

}  // namespace h2o
