// KvCache for Python: one layer of the cache with the engine's attention.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/make_backend.h"
#include "core/error.h"
#include "kv/cache.h"
#include "register.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

// (sequence, number of its rows), in the order of the rows.
using Lengths = std::vector<std::pair<int32_t, int32_t>>;

// Rotary positions of a cache.
struct Rotary {
  std::vector<float> frequencies;
  bool pairs;
  bool rolling;
};

// Per head; see Attention. Empty: none.
struct HeadLogits {
  std::vector<float> sinks;
  std::vector<float> slopes;
};

class AttentionCache {
 public:
  AttentionCache(const KvPolicy& policy, const KvShape& shape, const std::optional<Rotary>& rotary,
                 const HeadLogits& logits, const std::optional<Floats>& output_gram,
                 const std::string& device, int n_threads)
      : backend_(make_backend(device, n_threads)),
        rope_(upload(rotary, shape.head_dim)),
        sinks_(upload(logits.sinks, shape.n_heads)),
        slopes_(upload(logits.slopes, shape.n_heads)),
        rolling_(rotary && rotary->rolling),
        cache_(*backend_, policy, completed(shape, output_gram)) {
    for (int32_t s = 0; s < shape.n_sequences; ++s) start(s);
  }

  Floats attend(const Floats& q, const Floats& k, const Floats& v, const Lengths& lengths) {
    const KvShape& shape = cache_.shape();
    const py::ssize_t n = q.ndim() == 3 ? q.shape(0) : 0;
    check("q", q, n, shape.n_heads);
    check("k", k, n, shape.n_kv_heads);
    check("v", v, n, shape.n_kv_heads);
    check_range("q", q, largest_product_);
    check_range("k", k, std::min(largest_product_, largest_stored(shape.k_dtype)));
    check_range("v", v, std::min(largest_product_, largest_stored(shape.v_dtype)));
    Floats out({n, py::ssize_t{shape.n_heads}, py::ssize_t{shape.head_dim}});
    float* result = out.mutable_data();
    {
      const py::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      check(lengths, n);
      run(result, q.data(), k.data(), v.data(), lengths, n);
    }
    return out;
  }

  // Kept positions and their scores, in position order.
  py::tuple kept(int32_t kv_head, int32_t sequence) {
    std::vector<KvEntry> entries;
    {
      const py::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      entries = cache_.entries(0, sequence, kv_head);
    }
    return kept_arrays(entries);
  }

  void reset(int32_t sequence, const std::optional<KvPolicy>& policy) {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    if (policy) {
      cache_.reset(sequence, {&*policy, 1});
    } else {
      cache_.reset(sequence);
    }
    start(sequence);
  }

  size_t nbytes() const { return cache_.bytes(); }
  int32_t length(int32_t sequence) {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return cache_.length(sequence);
  }

 private:
  Rope upload(const std::optional<Rotary>& rotary, int32_t head_dim) {
    if (!rotary) return {};
    const auto n = std::ssize(rotary->frequencies);
    require(n > 0 && 2 * n <= head_dim, n, " rotary frequencies, expected 1 to head_dim / 2");
    frequencies_ = backend_->allocate(n * sizeof(float));
    backend_->write(frequencies_.data(), rotary->frequencies.data(), n * sizeof(float));
    return {.layout = rotary->pairs ? RopeLayout::pairs : RopeLayout::halves,
            .frequencies = {frequencies_.data(), DType::f32, 1, n}};
  }

  Buffer upload(const std::vector<float>& of_heads, int32_t n_heads) {
    if (of_heads.empty()) return {};
    require(std::ssize(of_heads) == n_heads, of_heads.size(), " numbers, expected one for each of ",
            n_heads, " heads");
    Buffer buffer = backend_->allocate(n_heads * sizeof(float));
    backend_->write(buffer.data(), of_heads.data(), buffer.size());
    return buffer;
  }

  static Tensor row(const Buffer& floats) {
    if (floats.size() == 0) return {};
    const auto n = static_cast<int64_t>(floats.size() / sizeof(float));
    return {floats.data(), DType::f32, 1, n};
  }

  KvShape completed(KvShape shape, const std::optional<Floats>& output_gram) {
    if (rolling_) shape.rope = rope_;
    if (output_gram) {
      require(
          output_gram->size() == py::ssize_t{shape.n_kv_heads} * shape.head_dim * shape.head_dim,
          "output_gram has ", output_gram->size(), " elements, expected [", shape.n_kv_heads, ", ",
          shape.head_dim, ", ", shape.head_dim, "]");
      output_gram_ = backend_->allocate(output_gram->nbytes());
      backend_->write(output_gram_.data(), output_gram->data(), output_gram_.size());
      shape.output_gram = output_gram_.as<float>();
    }
    return shape;
  }

  void start(int32_t sequence) {
    if (rolling_) cache_.roll(sequence);
  }

  void check(const char* name, const Floats& x, py::ssize_t n, int32_t heads) const {
    const int32_t head_dim = cache_.shape().head_dim;
    std::string got;
    for (py::ssize_t i = 0; i < x.ndim(); ++i) got += text(i > 0 ? ", " : "", x.shape(i));
    require(x.ndim() == 3 && x.shape(0) == n && x.shape(1) == heads && x.shape(2) == head_dim, name,
            " has shape [", got, "], expected [n, ", heads, ", ", head_dim,
            "] with the same n for q, k and v");
  }

  // The largest value of a stored row; rotation increases a value by at most sqrt(2).
  float largest_stored(DType dtype) const {
    constexpr float kHalf = 65504;  // also for block scales
    const float rotation = rope_.layout == RopeLayout::none ? 1 : 1.4143f;
    switch (dtype) {
      case DType::f16:
        return kHalf / rotation;
      case DType::q8_0:
        return 127 * kHalf / rotation;
      case DType::q5_0:
        return 16 * kHalf / rotation;
      case DType::q4_0:
        return 8 * kHalf / rotation;
      default:
        return std::numeric_limits<float>::max();
    }
  }

  // Without the sign, the bits of NaN and infinity exceed those of every number.
  static void check_range(const char* name, const Floats& x, float largest) {
    const auto magnitude = [](float value) { return std::bit_cast<uint32_t>(value) & 0x7fffffff; };
    const std::span<const float> values(x.data(), x.size());
    uint32_t found = 0;
    for (const float value : values) found = std::max(found, magnitude(value));
    if (found <= magnitude(largest)) return;
    const auto worst = std::ranges::find(values, found, magnitude);
    throw InvalidArgument(text("[attend] ", name, " has ", *worst,
                               ", expected finite numbers of at most ", largest, " here"));
  }

  void check(const Lengths& lengths, int64_t n) const {
    int64_t total = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const auto [sequence, rows] = lengths[i];
      require(rows > 0, "sequence ", sequence, " has no rows, expected at least one");
      require(rows <= cache_.room(sequence), rows, " more tokens for sequence ", sequence,
              ", the cache has room for ", cache_.room(sequence), " (max_tokens ",
              cache_.shape().max_tokens, ")");
      for (size_t j = 0; j < i; ++j) {
        require(lengths[j].first != sequence, "sequence ", sequence, " is named twice");
      }
      total += rows;
    }
    require(total == n && n > 0, "the sequences have ", total, " rows, q has ", n,
            ", expected the same number and at least one");
  }

  void run(float* out, const float* q, const float* k, const float* v, const Lengths& lengths,
           int64_t n) {
    const KvShape& shape = cache_.shape();
    if (n > shape.max_rows) cache_.reserve_rows(static_cast<int32_t>(n));

    const auto upload = [&](const float* data, int64_t heads, Buffer& buffer) {
      const Tensor t{nullptr, DType::f32, n, heads * shape.head_dim};
      if (static_cast<int64_t>(buffer.size()) < t.bytes()) buffer = backend_->allocate(t.bytes());
      if (data != nullptr) backend_->write(buffer.data(), data, t.bytes());
      return Tensor{buffer.data(), t.dtype, t.rows, t.cols};
    };
    const Attention attention{
        .out = upload(nullptr, shape.n_heads, out_),
        .q = upload(q, shape.n_heads, q_),
        .k = upload(k, shape.n_kv_heads, k_),
        .v = upload(v, shape.n_kv_heads, v_),
        .rope = rope_,
        .scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
        .sinks = row(sinks_),
        .slopes = row(slopes_),
    };
    Batch batch;
    for (const auto& [sequence, rows] : lengths) {
      batch.add(sequence, cache_.length(sequence), std::vector<int32_t>(rows),
                cache_.rolling(sequence));
    }
    backend_->run(batch, [&] { backend_->attend(attention, cache_.layer(0), batch); });
    cache_.advance(batch);
    backend_->read(out, attention.out.data, attention.out.bytes());
  }

  std::unique_ptr<Backend> backend_;
  Buffer frequencies_;
  Buffer output_gram_;
  const Rope rope_;
  const Buffer sinks_, slopes_;
  const bool rolling_;
  KvCache cache_;
  // Up to this value, sums of products and of values fit in float32.
  const float largest_product_ =
      std::sqrt(std::numeric_limits<float>::max() / static_cast<float>(cache_.shape().head_dim)) /
      2;
  Buffer out_, q_, k_, v_;
  std::mutex mutex_;
};

}  // namespace

void register_kv_cache(py::module_& m) {
  py::class_<Rotary>(m, "Rotary", "Rotary positions of a KvCache.")
      .def(py::init([](std::vector<float> frequencies, bool pairs, bool rolling) {
             return Rotary{std::move(frequencies), pairs, rolling};
           }),
           py::arg("frequencies"), py::kw_only(), py::arg("pairs"), py::arg("rolling"));

  py::class_<AttentionCache>(m, "KvCache", "One layer of the cache.")
      .def(
          py::init([](int32_t n_heads, int32_t n_kv_heads, int32_t head_dim, const KvPolicy& policy,
                      int32_t n_sequences, int32_t max_tokens, const std::optional<Rotary>& rotary,
                      std::vector<float> sink_logits, std::vector<float> alibi_slopes,
                      const std::optional<Floats>& output_gram, const std::string& k_dtype,
                      const std::string& v_dtype, const std::string& device, int n_threads) {
            const KvShape shape{.n_sequences = n_sequences,
                                .n_heads = n_heads,
                                .n_kv_heads = n_kv_heads,
                                .head_dim = head_dim,
                                .max_tokens = max_tokens,
                                .k_dtype = kv_dtype(k_dtype),
                                .v_dtype = kv_dtype(v_dtype)};
            const HeadLogits logits{std::move(sink_logits), std::move(alibi_slopes)};
            return std::make_unique<AttentionCache>(policy, shape, rotary, logits, output_gram,
                                                    device, n_threads);
          }),
          py::arg("n_heads"), py::arg("n_kv_heads"), py::arg("head_dim"), py::kw_only(),
          py::arg("policy"), py::arg("n_sequences"), py::arg("max_tokens"), py::arg("rotary"),
          py::arg("sink_logits"), py::arg("alibi_slopes"), py::arg("output_gram"),
          py::arg("k_dtype"), py::arg("v_dtype"), py::arg("device"), py::arg("threads"))
      .def("attend", &AttentionCache::attend, py::arg("q"), py::arg("k"), py::arg("v"),
           py::arg("lengths"))
      .def("kept", &AttentionCache::kept, py::arg("kv_head"), py::arg("sequence"))
      .def("reset", &AttentionCache::reset, py::arg("sequence"), py::arg("policy"))
      .def("length", &AttentionCache::length, py::arg("sequence"))
      .def_property_readonly("nbytes", &AttentionCache::nbytes);

  m.def(
      "cache_bytes",
      [](int32_t n_layers, int32_t n_kv_heads, int32_t head_dim,
         const std::vector<KvPolicy>& policies, int32_t max_tokens, const std::string& k_dtype,
         const std::string& v_dtype, bool may_roll, const std::vector<int64_t>& state_floats) {
        KvShape shape{.n_layers = n_layers,
                      .n_heads = n_kv_heads,
                      .n_kv_heads = n_kv_heads,
                      .head_dim = head_dim,
                      .max_tokens = max_tokens,
                      .k_dtype = kv_dtype(k_dtype),
                      .v_dtype = kv_dtype(v_dtype),
                      .state_floats = state_floats};
        if (may_roll) shape.rope.layout = RopeLayout::halves;  // both layouts need the same memory
        return KvCache::bytes(policies, shape);
      },
      py::kw_only(), py::arg("n_layers"), py::arg("n_kv_heads"), py::arg("head_dim"),
      py::arg("policies"), py::arg("max_tokens"), py::arg("k_dtype"), py::arg("v_dtype"),
      py::arg("may_roll"), py::arg("state_floats"),
      "Bytes of the cache of a sequence: K, V and what is known of each slot.");
}

}  // namespace h2o::python
