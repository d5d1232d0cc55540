// Sampling and Sampler for Python.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "register.h"
#include "text/sampler.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Words = py::array_t<uint32_t, py::array::c_style | py::array::forcecast>;

int32_t sample(Sampler& sampler, const Floats& logits, const std::optional<Words>& allowed) {
  const std::span<const float> values{logits.data(), static_cast<size_t>(logits.size())};
  std::span<const uint32_t> mask;
  if (allowed) mask = {allowed->data(), static_cast<size_t>(allowed->size())};
  const py::gil_scoped_release release;
  return sampler.sample(values, mask);
}

void set_samplers(SamplerOptions& options, const std::optional<std::vector<std::string>>& names) {
  options.samplers.reset();
  if (!names) return;
  std::vector<SamplerStep> steps;
  for (const std::string& name : *names) steps.push_back(sampler_step(name));
  options.samplers = std::move(steps);
}

void set_llama_cpp_samplers(SamplerOptions& options) {
  options.samplers.emplace(llama_cpp_steps().begin(), llama_cpp_steps().end());
}

void set_logit_bias(SamplerOptions& options, const std::map<int32_t, float>& biases) {
  options.logit_bias.clear();
  for (const auto& [token, bias] : biases) options.logit_bias.push_back({token, bias});
}

}  // namespace

void register_sampler(py::module_& m) {
  using O = SamplerOptions;
  py::class_<O>(m, "Sampling", "How tokens are chosen; the defaults are the engine's.")
      .def(py::init<>())
      .def("check", [](const O& options) { options.check(INT32_MAX); })
      .def_readwrite("temperature", &O::temperature)
      .def_readwrite("top_k", &O::top_k)
      .def_readwrite("top_p", &O::top_p)
      .def_readwrite("min_p", &O::min_p)
      .def_readwrite("repeat_penalty", &O::repeat_penalty)
      .def_readwrite("repeat_last_n", &O::repeat_last_n)
      .def_readwrite("seed", &O::seed)
      .def_readwrite("frequency_penalty", &O::frequency_penalty)
      .def_readwrite("presence_penalty", &O::presence_penalty)
      .def_readwrite("dry_multiplier", &O::dry_multiplier)
      .def_readwrite("dry_base", &O::dry_base)
      .def_readwrite("dry_allowed_length", &O::dry_allowed_length)
      .def_readwrite("dry_penalty_last_n", &O::dry_penalty_last_n)
      .def_readwrite("dry_sequence_breakers", &O::dry_breakers)
      .def_readwrite("typical_p", &O::typical_p)
      .def_readwrite("top_n_sigma", &O::top_n_sigma)
      .def_readwrite("xtc_probability", &O::xtc_probability)
      .def_readwrite("xtc_threshold", &O::xtc_threshold)
      .def_readwrite("dynatemp_range", &O::dynatemp_range)
      .def_readwrite("dynatemp_exponent", &O::dynatemp_exponent)
      .def_readwrite("mirostat", &O::mirostat)
      .def_readwrite("mirostat_tau", &O::mirostat_tau)
      .def_readwrite("mirostat_eta", &O::mirostat_eta)
      .def("set_logit_bias", &set_logit_bias, py::arg("biases"))
      .def("set_samplers", &set_samplers, py::arg("names"))
      .def("set_llama_cpp_samplers", &set_llama_cpp_samplers);

  py::class_<Sampler>(m, "Sampler", "Picks the next token from logits.")
      .def(py::init([](int32_t n_vocab, const SamplerOptions& options) {
             return std::make_unique<Sampler>(options, n_vocab);
           }),
           py::arg("n_vocab"), py::arg("options"))
      .def_property("random_state", &Sampler::random_state, &Sampler::set_random_state)
      .def("set_dry_breakers", &Sampler::set_dry_breakers, py::arg("flags"))
      .def(
          "accept", [](Sampler& s, int32_t token) { s.accept(token); }, py::arg("token"))
      .def("sample", &sample, py::arg("logits"), py::arg("allowed") = py::none());
}

}  // namespace h2o::python
