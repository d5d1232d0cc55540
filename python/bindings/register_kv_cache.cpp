// KvCache for Python: one layer and one sequence of the cache, with the engine's own attention.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

#include "backends/make_backend.h"
#include "core/error.h"
#include "kv/cache.h"
#include "register.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

class AttentionCache {
 public:
  AttentionCache(const KvPolicy& policy, const KvShape& shape, const std::string& device,
                 int n_threads)
      : backend_(make_backend(device, n_threads)), cache_(*backend_, policy, shape) {}

  Floats attend(const Floats& q, const Floats& k, const Floats& v) {
    const KvShape& shape = cache_.shape();
    const py::ssize_t n = q.ndim() == 3 ? q.shape(0) : 0;
    check("q", q, n, shape.n_heads);
    check("k", k, n, shape.n_kv_heads);
    check("v", v, n, shape.n_kv_heads);
    require(n > 0, "[attend] q has no rows, expected at least one");
    Floats out({n, py::ssize_t{shape.n_heads}, py::ssize_t{shape.head_dim}});
    float* result = out.mutable_data();
    {
      const py::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      run(result, q.data(), k.data(), v.data(), n);
    }
    return out;
  }

  // Kept positions and their scores, in position order.
  py::tuple kept(int32_t kv_head) {
    std::vector<KvEntry> entries;
    {
      const py::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      entries = cache_.entries(0, 0, kv_head);
    }
    return kept_arrays(entries);
  }

  void reset() {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    cache_.reset(0);
  }

  size_t nbytes() const { return cache_.bytes(); }
  int32_t length() {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return cache_.length(0);
  }

 private:
  void check(const char* name, const Floats& x, py::ssize_t n, int32_t heads) const {
    const int32_t head_dim = cache_.shape().head_dim;
    std::string got;
    for (py::ssize_t i = 0; i < x.ndim(); ++i) got += text(i > 0 ? ", " : "", x.shape(i));
    require(x.ndim() == 3 && x.shape(0) == n && x.shape(1) == heads && x.shape(2) == head_dim,
            "[attend] ", name, " has shape [", got, "], expected [n, ", heads, ", ", head_dim,
            "] with the same n for q, k and v");
  }

  void run(float* out, const float* q, const float* k, const float* v, int64_t n) {
    const KvShape& shape = cache_.shape();
    require(n <= cache_.room(0), "[attend] ", n, " more tokens, the cache has room for ",
            cache_.room(0), " (max_tokens ", shape.max_tokens, ")");
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
        .scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
    };
    Batch batch;
    batch.add(0, cache_.length(0), std::vector<int32_t>(n));
    backend_->run(batch, [&] { backend_->attend(attention, cache_.layer(0), batch); });
    cache_.advance(batch);
    backend_->read(out, attention.out.data, attention.out.bytes());
  }

  std::unique_ptr<Backend> backend_;
  KvCache cache_;
  Buffer out_, q_, k_, v_;
  std::mutex mutex_;
};

// x [n, n_heads, head_dim] turned by positions [n] with the back end's own rotary embedding.
Floats rope(const Floats& x, const py::array_t<int32_t, py::array::c_style>& positions,
            const Floats& frequencies, bool pairs) {
  require(
      x.ndim() == 3 && x.size() > 0 && positions.ndim() == 1 && positions.shape(0) == x.shape(0),
      "[rope] x must be [n, n_heads, head_dim], not empty, and positions [n]");
  require(frequencies.ndim() == 1 && 2 * frequencies.shape(0) <= x.shape(2),
          "[rope] more frequencies than half of head_dim");
  Floats out({x.shape(0), x.shape(1), x.shape(2)});
  std::copy_n(x.data(), x.size(), out.mutable_data());
  Batch batch;
  batch.positions.assign(positions.data(), positions.data() + positions.size());
  const auto tensor = [](const float* data, int64_t rows, int64_t cols) {
    return Tensor{reinterpret_cast<std::byte*>(const_cast<float*>(data)), DType::f32, rows, cols};
  };
  make_backend("cpu", 1)->rope(tensor(out.data(), x.shape(0), x.shape(1) * x.shape(2)),
                               static_cast<int32_t>(x.shape(2)),
                               {.layout = pairs ? RopeLayout::pairs : RopeLayout::halves,
                                .frequencies = tensor(frequencies.data(), 1, frequencies.shape(0))},
                               batch);
  return out;
}

}  // namespace

void register_kv_cache(py::module_& m) {
  py::class_<AttentionCache>(m, "KvCache", "One layer of the cache, for one sequence.")
      .def(py::init([](int32_t n_heads, int32_t n_kv_heads, int32_t head_dim, int32_t sinks,
                       int32_t heavy, std::optional<int32_t> recent, int32_t max_tokens,
                       const std::string& k_dtype, const std::string& v_dtype,
                       const std::string& device, int n_threads) {
             return std::make_unique<AttentionCache>(kv_policy(sinks, heavy, recent),
                                                     KvShape{.n_heads = n_heads,
                                                             .n_kv_heads = n_kv_heads,
                                                             .head_dim = head_dim,
                                                             .max_tokens = max_tokens,
                                                             .k_dtype = kv_dtype(k_dtype),
                                                             .v_dtype = kv_dtype(v_dtype)},
                                                     device, n_threads);
           }),
           py::arg("n_heads"), py::arg("n_kv_heads"), py::arg("head_dim"), py::kw_only(),
           py::arg("sinks"), py::arg("heavy"), py::arg("recent"), py::arg("max_tokens"),
           py::arg("k_dtype"), py::arg("v_dtype"), py::arg("device"), py::arg("threads"))
      .def("attend", &AttentionCache::attend, py::arg("q"), py::arg("k"), py::arg("v"))
      .def("kept", &AttentionCache::kept, py::arg("kv_head"))
      .def("reset", &AttentionCache::reset)
      .def_property_readonly("nbytes", &AttentionCache::nbytes)
      .def_property_readonly("length", &AttentionCache::length);

  m.def(
      "cache_bytes",
      [](int32_t n_layers, int32_t n_kv_heads, int32_t head_dim, int32_t sinks, int32_t heavy,
         std::optional<int32_t> recent, int32_t max_tokens, const std::string& k_dtype,
         const std::string& v_dtype) {
        const KvShape shape{.n_layers = n_layers,
                            .n_heads = n_kv_heads,
                            .n_kv_heads = n_kv_heads,
                            .head_dim = head_dim,
                            .max_tokens = max_tokens,
                            .k_dtype = kv_dtype(k_dtype),
                            .v_dtype = kv_dtype(v_dtype)};
        return KvCache::bytes(kv_policy(sinks, heavy, recent), shape);
      },
      py::kw_only(), py::arg("n_layers"), py::arg("n_kv_heads"), py::arg("head_dim"),
      py::arg("sinks"), py::arg("heavy"), py::arg("recent"), py::arg("max_tokens"),
      py::arg("k_dtype"), py::arg("v_dtype"),
      "Bytes that a cache would allocate for one sequence.");
  m.def("rope", &rope, py::arg("x"), py::arg("positions"), py::arg("frequencies"), py::kw_only(),
        py::arg("pairs"), "Rotary position embedding, as the CPU back end computes it.");
}

}  // namespace h2o::python
