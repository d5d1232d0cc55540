// Engine and Generation for Python.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "register.h"
#include "text/engine.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

using Tokens = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Mask = py::array_t<uint32_t, py::array::c_style>;

// Owns a Python object; may be destroyed by any thread.
template <class T>
std::shared_ptr<T> keep(T object) {
  return {new T(std::move(object)), [](T* kept) {
            const py::gil_scoped_acquire acquire;
            delete kept;
          }};
}

// Called between steps: checks Python's signals, such as Ctrl-C.
void check_signals() {
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A generation and its engine. The handle of a request cancels it at the end: a __del__ in Python
// would do so too, but ignore a KeyboardInterrupt meanwhile.
struct Handle {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Generation> generation;
  bool cancels;

  Handle(std::shared_ptr<Engine> of, std::shared_ptr<Generation> one, bool cancels_it)
      : engine(std::move(of)), generation(std::move(one)), cancels(cancels_it) {}
  Handle(Handle&&) = default;
  ~Handle() {
    if (!cancels || generation == nullptr) return;
    const py::gil_scoped_release release;
    engine->cancel(generation);
  }
};

py::bytes bytes_from(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<int32_t> vector_of(const Tokens& tokens) {
  return {tokens.data(), tokens.data() + tokens.size()};
}

const char* finish_reason(Finish finish) {
  switch (finish) {
    case Finish::stop:
      return "stop";
    case Finish::length:
      return "length";
    case Finish::cancelled:
      return "cancelled";
    default:
      return nullptr;
  }
}

Pooling pooling_named(const std::string& name) {
  if (name == "none") return Pooling::none;
  if (name == "mean") return Pooling::mean;
  if (name == "cls") return Pooling::first;
  if (name == "rank") return Pooling::rank;
  require(name == "last", "pooling='", name, "', expected 'mean' or 'last'");
  return Pooling::last;
}

// Owns the engine until the request ends; otherwise the callback could destroy it.
Constraint constraint_from(py::object callback, std::shared_ptr<Engine> engine) {
  if (callback.is_none()) return nullptr;
  return [kept = keep(std::move(callback)), engine = std::move(engine)](
             std::span<const int32_t> tokens, std::span<uint32_t> allowed) {
    const py::gil_scoped_acquire acquire;
    Mask mask(static_cast<py::ssize_t>(allowed.size()));
    std::fill_n(mask.mutable_data(), allowed.size(), 0u);
    (*kept)(Tokens(static_cast<py::ssize_t>(tokens.size()), tokens.data()), mask);
    std::copy_n(mask.data(), allowed.size(), allowed.begin());
  };
}

// A callback with a method `ready` computes masks in the background.
ConstraintReady constraint_ready_from(const py::object& callback) {
  if (!py::hasattr(callback, "ready")) return nullptr;
  return [kept = keep(callback.attr("ready"))](std::span<const int32_t> tokens) {
    const py::gil_scoped_acquire acquire;
    return (*kept)(Tokens(static_cast<py::ssize_t>(tokens.size()), tokens.data())).cast<bool>();
  };
}

std::shared_ptr<Engine> make_engine(std::shared_ptr<Model> model,
                                    std::shared_ptr<Tokenizer> tokenizer,
                                    const SessionOptions& options, PrefixCacheOptions prefixes,
                                    std::shared_ptr<DraftModel> draft_model) {
  prefixes.disk.build = H2O_VERSION;
  const py::gil_scoped_release release;
  // The destructor joins a thread that may need the GIL.
  return {
      new Engine(std::move(model), std::move(tokenizer), options, prefixes, std::move(draft_model)),
      [](Engine* engine) {
        if (PyGILState_Check() != 0) {
          const py::gil_scoped_release release_here;
          delete engine;
        } else {
          delete engine;
        }
      }};
}

// log: called with a line about each invalid file.
void set_disk(PrefixCacheOptions& options, std::filesystem::path directory, uint64_t max_bytes,
              py::object log) {
  options.disk.directory = std::move(directory);
  options.disk.max_bytes = max_bytes;
  options.disk.log = [kept = keep(std::move(log))](const std::string& message) {
    const py::gil_scoped_acquire acquire;
    (*kept)(message);
  };
}

std::vector<TokenSpan> spans_of(const std::vector<std::pair<size_t, size_t>>& pairs) {
  std::vector<TokenSpan> spans;
  for (const auto& [begin, end] : pairs) spans.push_back({begin, end});
  return spans;
}

Handle submit(const std::shared_ptr<Engine>& engine, const Tokens& prompt,
              const std::optional<py::bytes>& after, const Handle* follows,
              const SamplerOptions& sampling, bool seeded, std::optional<int32_t> max_tokens,
              std::vector<std::string> stop, bool ignore_end, std::vector<int32_t> spelled,
              std::vector<KvPolicy> policies, std::pair<int32_t, int32_t> protect,
              const std::vector<std::pair<size_t, size_t>>& replies, std::shared_ptr<Trace> trace,
              const std::string& pooling, py::object constraint, bool drafts, bool keeps_cache,
              bool eager, int32_t group, bool begin) {
  ConstraintReady ready = constraint_ready_from(constraint);
  Request request{.prompt = vector_of(prompt),
                  .sampling = sampling,
                  .seeded = seeded,
                  .max_tokens = max_tokens,
                  .stop = std::move(stop),
                  .ignore_end = ignore_end,
                  .spelled = std::move(spelled),
                  .policies = std::move(policies),
                  .replies = spans_of(replies),
                  .protect = {protect.first, protect.second},
                  .trace = std::move(trace),
                  .pooling = pooling_named(pooling),
                  .constraint = constraint_from(std::move(constraint), engine),
                  .constraint_ready = std::move(ready),
                  .drafts = drafts,
                  .keeps_cache = keeps_cache,
                  .eager = eager,
                  .group = group};
  if (after) {
    const std::string_view view = *after;
    request.after = {std::as_bytes(std::span(view)), keep(*after)};
  }
  if (follows) request.follows = follows->generation;
  const py::gil_scoped_release release;
  return {engine, engine->submit(std::move(request), begin), true};
}

void begin(Engine& engine, const std::vector<const Handle*>& handles) {
  std::vector<Engine::Handle> generations;
  for (const Handle* handle : handles) generations.push_back(handle->generation);
  const py::gil_scoped_release release;
  engine.begin(generations);
}

// Logits after each token of a text, [n, n_vocab].
Floats logits(const std::shared_ptr<Engine>& engine, const Tokens& tokens) {
  const py::ssize_t n_vocab = engine->shared_session()->model().config.n_vocab;
  Floats out({tokens.size(), n_vocab});
  float* const rows = out.mutable_data();
  Request request{.prompt = vector_of(tokens),
                  .max_tokens = 0,
                  .prompt_logits = [rows](int32_t i, std::span<const float> row) {
                    std::ranges::copy(row, rows + i * row.size());
                  }};
  const py::gil_scoped_release release;
  const auto generation = engine->submit(std::move(request));
  try {
    while (engine->next(generation, check_signals)) {
    }
  } catch (...) {
    engine->cancel(generation);
    engine->wait_ended(generation);  // so that nothing writes to `out` any more
    throw;
  }
  if (generation->progress().finish == Finish::cancelled) {
    throw std::runtime_error("the engine is closed");
  }
  return out;
}

std::optional<std::string> next(const Handle& handle) {
  const py::gil_scoped_release release;
  std::optional<Piece> piece = handle.engine->next(handle.generation, check_signals);
  if (!piece) return std::nullopt;
  return std::move(piece->text);
}

std::optional<std::string> poll(const Handle& handle) {
  const py::gil_scoped_release release;
  std::optional<Piece> piece = handle.engine->poll(handle.generation);
  if (!piece) return std::nullopt;
  return std::move(piece->text);
}

template <class Value>
auto property(Value (Generation::*get)() const) {
  return [get](const Handle& handle) { return (handle.generation.get()->*get)(); };
}

template <class Field>
auto progress(Field Progress::* field) {
  return [field](const Handle& handle) { return handle.generation->progress().*field; };
}

}  // namespace

void register_engine(py::module_& m) {
  py::register_exception<ContextFull>(m, "ContextFullError", PyExc_ValueError);

  py::class_<Handle>(m, "Generation", "The state of a request in the engine.")
      .def("next", &next, "The next piece of text; waits for it, or computes it.")
      .def("poll", &poll, "All text that is ready, or None.")
      .def(
          "cancel", [](const Handle& h) { h.engine->cancel(h.generation); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "save",
          [](const Handle& h, std::string note) {
            std::vector<std::byte> bytes;
            {
              const py::gil_scoped_release release;
              bytes = h.engine->save(h.generation, std::move(note), check_signals);
            }
            return bytes_from(bytes);
          },
          py::arg("note"))
      .def(
          "check_may_wait", [](const Handle& h) { h.engine->check_may_wait(); },
          "RuntimeError in a constraint of its engine.", py::call_guard<py::gil_scoped_release>())
      .def(
          "subscribe",
          [](const Handle& h, std::shared_ptr<Mailbox> mailbox) {
            h.engine->subscribe(h.generation, std::move(mailbox));
          },
          py::arg("mailbox"), py::call_guard<py::gil_scoped_release>())
      .def(
          "wait_admitted",
          [](const Handle& h, std::optional<double> timeout) {
            return h.engine->wait_admitted(h.generation, timeout.value_or(-1), check_signals);
          },
          py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly(
          "key", [](const Handle& h) { return reinterpret_cast<uintptr_t>(h.generation.get()); })
      .def_property_readonly("text", property(&Generation::text))
      .def_property_readonly("text_read", property(&Generation::text_read))
      .def_property_readonly("embedding",
                             [](const Handle& handle) {
                               const std::vector<float> found = handle.generation->embedding();
                               return Floats(std::ssize(found), found.data());
                             })
      .def_property_readonly("tokens", property(&Generation::tokens))
      .def_property_readonly("generated_tokens", property(&Generation::generated_tokens))
      .def_property_readonly("n_tokens_read", property(&Generation::n_tokens_read))
      .def_property_readonly("began", property(&Generation::began))
      .def_property_readonly("admitted", property(&Generation::admitted))
      .def_property_readonly(
          "finish_reason",
          [](const Handle& h) { return finish_reason(h.generation->progress().finish); })
      .def_property_readonly("finish_message", progress(&Progress::finish_message))
      .def_property_readonly("stop_string", progress(&Progress::stop_string))
      .def_property_readonly("prompt_tokens", progress(&Progress::n_prompt))
      .def_property_readonly("cached_tokens", progress(&Progress::n_cached))
      .def_property_readonly("n_generated", progress(&Progress::n_generated))
      .def_property_readonly("n_drafted", progress(&Progress::n_drafted))
      .def_property_readonly("n_accepted", progress(&Progress::n_accepted))
      .def_property_readonly("forgotten",
                             [](const Handle& h) {
                               const Forgotten found = h.generation->progress().forgotten;
                               return std::pair(found.n_evicted, found.n_archived);
                             })
      .def_property_readonly("kept",
                             [](const Handle& h) -> std::optional<py::bytes> {
                               const Forgotten found = h.generation->progress().forgotten;
                               if (found.kept == nullptr) return std::nullopt;
                               return py::bytes(found.kept->data(), found.kept->size());
                             })
      .def_property_readonly("prompt_tokens_read", progress(&Progress::n_read))
      .def_property_readonly("prompt_seconds", progress(&Progress::prompt_seconds))
      .def_property_readonly("decode_seconds", progress(&Progress::decode_seconds));

  m.attr("DEFAULT_PREFIX_DISK_BYTES") = PrefixDiskOptions::kDefaultBytes;
  using P = PrefixCacheOptions;
  py::class_<P>(m, "PrefixCacheOptions", "Which states of prompts are kept; by default, none.")
      .def(py::init<>())
      .def_readwrite("max_bytes", &P::max_bytes)
      .def_readwrite("ends", &P::ends)
      .def("set_disk", &set_disk, py::arg("directory"), py::arg("max_bytes"), py::arg("log"));

  py::class_<DraftModel, std::shared_ptr<DraftModel>>(
      m, "DraftModel", "A model that proposes what another one generates.")
      .def(py::init<std::shared_ptr<Model>, SessionOptions, int32_t>(),
           py::arg("model").none(false), py::arg("options"), py::arg("n_vocab"))
      .def_static("of_predictor", &DraftModel::of_predictor, py::arg("model").none(false),
                  py::arg("options"))
      .def_static("of_full_cache", &DraftModel::of_full_cache, py::arg("model").none(false),
                  py::arg("options"));

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine", "Generates texts, many at once.")
      .def(py::init(&make_engine), py::arg("model").none(false), py::arg("tokenizer").none(false),
           py::arg("options"), py::arg("prefixes") = PrefixCacheOptions{},
           py::arg("draft_model") = py::none())
      .def("submit", &submit, py::arg("prompt"), py::kw_only(), py::arg("after") = py::none(),
           py::arg("follows") = py::none(), py::arg("sampling"), py::arg("seeded") = true,
           py::arg("max_tokens") = py::none(), py::arg("stop") = std::vector<std::string>{},
           py::arg("ignore_end") = false, py::arg("spelled") = std::vector<int32_t>{},
           py::arg("policies") = std::vector<KvPolicy>{}, py::arg("protect") = std::pair(0, 0),
           py::arg("replies") = std::vector<std::pair<size_t, size_t>>{},
           py::arg("trace") = py::none(), py::arg("pooling") = "none",
           py::arg("constraint") = py::none(), py::arg("drafts") = false,
           py::arg("keeps_cache") = false, py::arg("eager") = false, py::arg("group") = 0,
           py::arg("begin") = true)
      .def("begin", &begin, py::arg("generations"))
      .def("logits", &logits, py::arg("tokens"))
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>())
      .def("cancel_group", &Engine::cancel_group, py::arg("group"),
           py::call_guard<py::gil_scoped_release>())
      .def("set_max_queue", &Engine::set_max_queue, py::arg("n"),
           py::call_guard<py::gil_scoped_release>())
      .def("last",
           [](const std::shared_ptr<Engine>& engine) -> std::optional<Handle> {
             auto last = engine->last();
             if (last == nullptr) return std::nullopt;
             return Handle(engine, std::move(last), false);
           })
      .def_property_readonly("last_sequence", &Engine::last_sequence)
      .def_property_readonly("endless", &Engine::endless)
      .def_property_readonly("closed", &Engine::closed)
      .def_property_readonly("session", py::cpp_function(&Engine::shared_session,
                                                         py::call_guard<py::gil_scoped_release>()))
      .def("stats", [](const Engine& engine) {
        const EngineStats s = engine.stats();
        return py::make_tuple(s.n_sequences, s.n_active, s.n_waiting, s.prompt_tokens,
                              s.generated_tokens, s.evictions, s.cached_tokens, s.prefix_bytes,
                              s.n_allocated, s.drafted_tokens, s.accepted_tokens, s.draft_bytes);
      });
}

}  // namespace h2o::python
