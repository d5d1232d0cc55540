// Model, Session and ImportanceMatrix for Python.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/make_backend.h"
#include "core/error.h"
#include "model/activations.h"
#include "model/family.h"
#include "model/file_kind.h"
#include "model/importance.h"
#include "model/predictor.h"
#include "model/session.h"
#include "register.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

using Tokens = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

std::span<const int32_t> span_of(const Tokens& tokens) {
  return {tokens.data(), static_cast<size_t>(tokens.size())};
}

// progress: None, or a function of (bytes loaded, total bytes); an exception ends loading.
std::shared_ptr<Model> load_model(const GgufShards& file, const std::string& device, int n_threads,
                                  const py::object& progress, size_t max_resident, bool exact) {
  LoadProgress tell;
  if (!progress.is_none()) {
    tell = [&progress](size_t loaded, size_t total) {
      const py::gil_scoped_acquire acquire;
      progress(loaded, total);
    };
  }
  const py::gil_scoped_release release;
  return std::make_shared<Model>(file, make_backend(device, n_threads, exact), tell, max_resident);
}

// pages: that each query recalls; 0: the default. directory: of the archive's files; empty: in
// memory.
void set_archive(SessionOptions& options, const std::string& k_dtype, const std::string& v_dtype,
                 int32_t pages, std::filesystem::path directory, double heads) {
  options.archive = {.n_recalled = pages == 0 ? default_archive_pages(options.n_ctx) : pages,
                     .k_dtype = archive_k_dtype(k_dtype),
                     .v_dtype = archive_v_dtype(v_dtype),
                     .directory = std::move(directory)};
  options.archive_heads = heads;
}

Positions positions_named(const std::string& name) {
  if (name == "original") return Positions::original;
  if (name == "rolling") return Positions::rolling;
  if (name == "auto") return Positions::automatic;
  throw InvalidArgument(concat("positions is '", name, "', expected original, rolling or auto"));
}

Floats step(Session& session, const std::vector<std::pair<int32_t, Tokens>>& inputs) {
  std::vector<Input> spans;
  for (const auto& [sequence, tokens] : inputs) spans.push_back({sequence, span_of(tokens)});
  std::span<const float> logits;
  {
    const py::gil_scoped_release release;
    logits = session.step(spans);
  }
  return Floats({std::ssize(inputs), py::ssize_t{session.model().config.n_vocab}}, logits.data());
}

Tokens greedy(Session& session, const std::vector<std::pair<int32_t, Tokens>>& inputs,
              int32_t n_drafts) {
  std::vector<Input> spans;
  for (const auto& [sequence, tokens] : inputs) {
    spans.push_back({sequence, span_of(tokens), n_drafts});
  }
  std::span<const int32_t> tokens;
  {
    const py::gil_scoped_release release;
    tokens = session.greedy(spans);
  }
  return Tokens(std::ssize(tokens), tokens.data());
}

// Returns those of the last step [n, n_embd].
Floats hidden_states(Session& session, int32_t sequence) {
  std::vector<float> states;
  session.read_hidden_states(sequence, states);
  const py::ssize_t width = session.model().config.n_embd;
  return Floats({std::ssize(states) / width, width}, states.data());
}

Floats score(Session& session, int32_t sequence, const Tokens& tokens) {
  Floats out({tokens.size(), py::ssize_t{session.model().config.n_vocab}});
  float* rows = out.mutable_data();
  const Input input{sequence, span_of(tokens)};
  const py::gil_scoped_release release;
  session.score(input, [&](int32_t i, std::span<const float> logits) {
    std::copy(logits.begin(), logits.end(), rows + i * logits.size());
  });
  return out;
}

// (name, squares [matrices, n_cols], counts [matrices]) of each tensor.
py::list sums(const ImportanceMatrix& matrix) {
  py::list out;
  for (const auto& [name, n_cols, squares, counts] : matrix.sums()) {
    const auto n = std::ssize(counts);
    out.append(py::make_tuple(name, py::array_t<double>({n, py::ssize_t{n_cols}}, squares.data()),
                              py::array_t<int64_t>(n, counts.data())));
  }
  return out;
}

// Kept positions and their scores, in position order.
py::tuple kept(const Session& session, int32_t layer, int32_t kv_head, int32_t sequence) {
  std::vector<KvEntry> entries;
  {
    const py::gil_scoped_release release;
    entries = session.entries(layer, sequence, kv_head);
  }
  return kept_arrays(entries);
}

py::bytes save(const Session& session, int32_t sequence, std::vector<int32_t> tokens,
               std::string note) {
  std::vector<std::byte> bytes;
  {
    const py::gil_scoped_release release;
    SnapshotText text;
    text.tokens = std::move(tokens);
    text.note = std::move(note);
    bytes = session.save(sequence, std::move(text));
  }
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void load(Session& session, int32_t sequence, const py::bytes& snapshot) {
  const std::string_view view = snapshot;
  const py::gil_scoped_release release;
  session.load(sequence, std::as_bytes(std::span(view)));
}

// (tokens, note, n_read, random_state)
py::tuple read_snapshot(const py::bytes& snapshot) {
  const std::string_view view = snapshot;
  SnapshotText text;
  {
    const py::gil_scoped_release release;
    text = open_snapshot(std::as_bytes(std::span(view))).text;
  }
  return py::make_tuple(
      text.tokens, py::bytes(text.note), text.n_read,
      text.random_state.empty() ? py::object(py::none()) : py::bytes(text.random_state));
}

}  // namespace

// Registers the properties of a class with a Config.
template <class Class>
void add_config(Class& bound, const auto& config_of) {
  const auto add = [&](const char* name, const auto& value_of) {
    bound.def_property_readonly(
        name, [=](const typename Class::type& self) { return value_of(config_of(self)); });
  };
  add("architecture", [](const Config& c) { return c.family->architecture; });
  add("state_floats", [](const Config& c) { return c.state_floats(); });
  add("default_drafts", &default_drafts);
  add("attention_layers", [](const Config& c) { return c.attention_layers; });
  add("kv_sources", [](const Config& c) { return c.kv_sources; });
  add("is_encoder", [](const Config& c) { return c.family->encoder; });
  add("n_labels", [](const Config& c) { return c.n_labels; });
  add("shared_values", [](const Config& c) { return c.latent.rank > 0; });
  add("n_ctx_train", [](const Config& c) { return c.n_ctx_train; });
  add("can_roll", [](const Config& c) { return c.can_roll(); });
  add("n_layers", [](const Config& c) { return c.n_layers; });
  add("n_heads", [](const Config& c) { return c.n_heads; });
  add("n_kv_heads", [](const Config& c) { return c.n_kv_heads; });
  add("head_dim", [](const Config& c) { return c.head_dim; });
  add("layer_heads", [](const Config& c) {
    std::vector<std::pair<int32_t, int32_t>> heads;
    for (int32_t l = 0; l < c.n_layers; ++l) {
      heads.emplace_back(c.sizes(l).n_kv_heads, c.sizes(l).head_dim);
    }
    return heads;
  });
  add("n_vocab", [](const Config& c) { return c.n_vocab; });
}

void register_session(py::module_& m) {
  m.def("architectures", &architectures, "general.architecture of the models that can be run.");

  py::class_<Config> config(m, "Config", "The parameters of a model in a GGUF file.");
  config.def(py::init([](const GgufShards& model) { return read_config(model); }), py::arg("model"))
      .def("activation_bytes", &activation_bytes, py::arg("n_rows"), py::arg("n_logits"));
  add_config(config, [](const Config& c) -> const Config& { return c; });

  py::class_<Model, std::shared_ptr<Model>> model(m, "Model",
                                                  "A GGUF file made ready on a back end.");
  model
      .def(py::init(&load_model), py::arg("file"), py::kw_only(), py::arg("device"),
           py::arg("threads"), py::arg("progress") = py::none(), py::arg("max_resident") = 0,
           py::arg("exact") = false)
      .def(py::init([](const std::filesystem::path& path, const std::string& device, int threads) {
             return load_model(GgufShards(path), device, threads, py::none(), 0, false);
           }),
           py::arg("file"), py::kw_only(), py::arg("device"), py::arg("threads"))
      .def_property_readonly("backend", [](const Model& model) { return model.backend->name(); })
      .def_property_readonly("unused_parts",
                             [](const Model& model) { return unused_parts(model.file); })
      .def_property_readonly("shards", [](const Model& model) { return model.file; })
      // A tokenizer does not keep the weights alive.
      .def_property_readonly("file",
                             [](const Model& model) { return model.file.shared_first_file(); })
      .def_property_readonly("n_streamed_layers",
                             [](const Model& m) {
                               return m.weights.residency ? m.weights.residency->n_streamed() : 0;
                             })
      .def_property_readonly("streamed_bytes",
                             [](const Model& m) {
                               return m.weights.residency ? m.weights.residency->streamed_bytes()
                                                          : 0;
                             })
      .def_property_readonly("n_kept_experts",
                             [](const Model& m) {
                               return m.weights.residency ? m.weights.residency->n_kept_experts()
                                                          : 0;
                             })
      .def_property_readonly(
          "experts_needed",
          [](const Model& m) { return m.weights.residency ? m.weights.residency->n_needed() : 0; })
      .def_property_readonly("experts_read", [](const Model& m) {
        return m.weights.residency ? m.weights.residency->n_read() : 0;
      });
  add_config(model, [](const Model& m) -> const Config& { return m.config; });
  m.def("next_token_predictor", &next_token_predictor, py::arg("model").none(false));

  using O = SessionOptions;
  py::class_<O>(m, "SessionOptions", "How the caches of a session are set up.")
      .def(py::init<>())
      .def_readwrite("policies", &O::policies)
      .def_readwrite("n_ctx", &O::n_ctx)
      .def_readwrite("n_batch", &O::n_batch)
      .def_readwrite("max_drafts", &O::max_drafts)
      .def_readwrite("n_sequences", &O::n_sequences)
      .def_readwrite("max_sequences", &O::max_sequences)
      .def(
          "set_dtypes",
          [](O& options, const std::string& k_dtype, const std::string& v_dtype) {
            options.k_dtype = kv_dtype(k_dtype);
            options.v_dtype = kv_dtype(v_dtype);
          },
          py::arg("k_dtype"), py::arg("v_dtype"))
      .def(
          "set_positions",
          [](O& options, const std::string& name) { options.positions = positions_named(name); },
          py::arg("name"))
      .def("set_archive", &set_archive, py::arg("k_dtype"), py::arg("v_dtype"), py::kw_only(),
           py::arg("pages"), py::arg("directory"), py::arg("heads"));

  py::class_<Session, std::shared_ptr<Session>>(m, "Session",
                                                "Sequences of one model with their bounded cache.")
      .def(py::init<std::shared_ptr<Model>, const SessionOptions&>(), py::arg("model").none(false),
           py::arg("options"), py::call_guard<py::gil_scoped_release>())
      .def("step", &step, py::arg("inputs"))
      .def("greedy", &greedy, py::arg("inputs"), py::arg("n_drafts") = 0)
      .def("retract", &Session::retract, py::arg("sequence"), py::arg("n"),
           py::call_guard<py::gil_scoped_release>())
      .def("score", &score, py::arg("sequence"), py::arg("tokens"))
      .def("hidden_states", &hidden_states, py::arg("sequence"))
      .def(
          "set_hidden",
          [](Session& s, const Floats& states) {
            s.set_hidden({states.data(), static_cast<size_t>(states.size())});
          },
          py::arg("states"))
      .def(
          "reset",
          [](Session& s, int32_t sequence, const std::vector<KvPolicy>& policies) {
            s.reset(sequence, policies);
          },
          py::arg("sequence"), py::arg("policies") = std::vector<KvPolicy>{},
          py::call_guard<py::gil_scoped_release>())
      .def("save", &save, py::arg("sequence"), py::arg("tokens"), py::arg("note"))
      .def("load", &load, py::arg("sequence"), py::arg("snapshot"))
      .def("room", &Session::room, py::arg("sequence"), py::call_guard<py::gil_scoped_release>())
      .def("chunk", &Session::chunk, py::arg("sequence"), py::call_guard<py::gil_scoped_release>())
      .def("can_roll", &Session::can_roll, py::arg("sequence"),
           py::call_guard<py::gil_scoped_release>())
      .def("rolling", &Session::rolling, py::arg("sequence"),
           py::call_guard<py::gil_scoped_release>())
      .def("kept", &kept, py::arg("layer"), py::arg("kv_head"), py::arg("sequence"))
      .def("tokens_seen", &Session::tokens_seen, py::arg("sequence"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "tokens_kept",
          [](const Session& s, int32_t sequence, std::optional<int32_t> layer) {
            return layer ? s.tokens_kept(sequence, *layer) : s.tokens_kept(sequence);
          },
          py::arg("sequence"), py::arg("layer") = py::none(),
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("n_ctx", [](const Session& s) { return s.options().n_ctx; })
      .def_property_readonly("n_sequences",
                             [](const Session& s) { return s.options().n_sequences; })
      .def_property_readonly("n_batch", [](const Session& s) { return s.options().n_batch; })
      .def_property_readonly(
          "cache_bytes",
          py::cpp_function(&Session::cache_bytes, py::call_guard<py::gil_scoped_release>()))
      .def_property_readonly(
          "n_clamped",
          py::cpp_function(&Session::n_clamped, py::call_guard<py::gil_scoped_release>()))
      .def_property_readonly(
          "archive_bytes",
          py::cpp_function(&Session::archive_bytes, py::call_guard<py::gil_scoped_release>()))
      .def_property_readonly(
          "full_cache_bytes",
          py::cpp_function(&Session::full_cache_bytes, py::call_guard<py::gil_scoped_release>()));

  py::class_<ImportanceMatrix>(m, "ImportanceMatrix",
                               "The inputs of a model's matrices, summed up.")
      .def(py::init<std::shared_ptr<Model>>(), py::arg("model").none(false),
           py::call_guard<py::gil_scoped_release>())
      .def("end", &ImportanceMatrix::end, py::call_guard<py::gil_scoped_release>())
      .def("sums", &sums);

  m.def("read_snapshot", &read_snapshot, py::arg("snapshot"),
        "Tokens, note, n_read and random state of a snapshot.");
}

}  // namespace h2o::python
