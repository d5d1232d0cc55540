// KvCache for Python: one layer of the cache with the engine's attention.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/make_backend.h"
#include "kv/attention_cache.h"
#include "register.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

FloatArray array(const Floats& x) { return {x.data(), {x.shape(), x.shape() + x.ndim()}}; }

Floats attend(AttentionCache& cache, const Floats& q, const Floats& k, const Floats& v,
              const AttentionCache::Lengths& lengths) {
  auto out = std::make_unique<std::vector<float>>();
  {
    const py::gil_scoped_release release;
    *out = cache.attend(array(q), array(k), array(v), lengths);
  }
  const KvShape& shape = cache.shape();
  const float* const data = out->data();
  const py::capsule owner(out.get(),
                          [](void* values) { delete static_cast<std::vector<float>*>(values); });
  (void)out.release();
  return Floats({q.shape(0), py::ssize_t{shape.n_heads}, py::ssize_t{shape.head_dim}}, data, owner);
}

py::tuple kept(AttentionCache& cache, int32_t kv_head, int32_t sequence) {
  std::vector<KvEntry> entries;
  {
    const py::gil_scoped_release release;
    entries = cache.kept(kv_head, sequence);
  }
  return kept_arrays(entries);
}

}  // namespace

void register_kv_cache(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> without_gil;
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
            std::optional<std::span<const float>> gram;
            if (output_gram) gram = {output_gram->data(), static_cast<size_t>(output_gram->size())};
            return std::make_unique<AttentionCache>(make_backend(device, n_threads), policy, shape,
                                                    rotary, logits, gram);
          }),
          py::arg("n_heads"), py::arg("n_kv_heads"), py::arg("head_dim"), py::kw_only(),
          py::arg("policy"), py::arg("n_sequences"), py::arg("max_tokens"), py::arg("rotary"),
          py::arg("sink_logits"), py::arg("alibi_slopes"), py::arg("output_gram"),
          py::arg("k_dtype"), py::arg("v_dtype"), py::arg("device"), py::arg("threads"))
      .def("attend", &attend, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("lengths"))
      .def("kept", &kept, py::arg("kv_head"), py::arg("sequence"))
      .def("reset", &AttentionCache::reset, py::arg("sequence"), py::arg("policy"), without_gil)
      .def("length", &AttentionCache::length, py::arg("sequence"), without_gil)
      .def_property_readonly("nbytes", &AttentionCache::bytes);

  m.def(
      "cache_bytes",
      [](int32_t n_layers, int32_t n_kv_heads, int32_t head_dim,
         const std::vector<KvPolicy>& policies, int32_t max_tokens, const std::string& k_dtype,
         const std::string& v_dtype, bool may_roll, const std::vector<int64_t>& state_floats,
         const std::vector<bool>& attention_layers, bool shared_values,
         const std::vector<std::pair<int32_t, int32_t>>& layer_heads,
         const std::vector<int32_t>& sources) {
        KvShape shape{.n_layers = n_layers,
                      .n_heads = n_kv_heads,
                      .n_kv_heads = n_kv_heads,
                      .head_dim = head_dim,
                      .max_tokens = max_tokens,
                      .k_dtype = kv_dtype(k_dtype),
                      .v_dtype = kv_dtype(v_dtype),
                      .shared_values = shared_values,
                      .sources = sources,
                      .state_floats = state_floats,
                      .attention_layers = attention_layers};
        for (const auto& [n, dim] : layer_heads) shape.layer_heads.push_back({n, dim});
        if (may_roll) shape.rope.layout = RopeLayout::halves;  // both layouts need the same memory
        return KvCache::bytes(policies, shape);
      },
      py::kw_only(), py::arg("n_layers"), py::arg("n_kv_heads"), py::arg("head_dim"),
      py::arg("policies"), py::arg("max_tokens"), py::arg("k_dtype"), py::arg("v_dtype"),
      py::arg("may_roll"), py::arg("state_floats"), py::arg("attention_layers"),
      py::arg("shared_values"), py::arg("layer_heads"), py::arg("sources"),
      "Bytes of the cache of a sequence: K, V and what is known of each slot.");
}

}  // namespace h2o::python
