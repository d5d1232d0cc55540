// Detokenizer and Trace for Python: text and what is written down of a sequence.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "register.h"
#include "text/detokenizer.h"
#include "text/trace.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

py::tuple logprobs(const Trace& trace, size_t begin, size_t end) {
  const std::vector<TokenLogprob> found = trace.logprobs(begin, end);
  py::tuple list(found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    py::tuple top(found[i].top.size());
    for (size_t j = 0; j < found[i].top.size(); ++j) {
      top[j] = py::make_tuple(found[i].top[j].first, found[i].top[j].second);
    }
    list[i] = py::make_tuple(found[i].token, found[i].logprob, top);
  }
  return list;
}

py::array_t<float> array_of(const std::vector<float>& numbers) {
  return py::array_t<float>(static_cast<py::ssize_t>(numbers.size()), numbers.data());
}

py::object kept_of(const Trace& trace) {
  const std::optional<Kept> found = trace.kept();
  if (!found) return py::none();
  return py::make_tuple(found->tokens_kept, array_of(found->shares), array_of(found->recalls));
}

}  // namespace

void register_trace(py::module_& m) {
  py::class_<Detokenizer>(m, "Detokenizer", "From the bytes of tokens to text that can be shown.")
      .def(py::init([](const std::vector<std::string>& stop) { return Detokenizer(stop); }),
           py::arg("stop") = std::vector<std::string>{})
      .def(
          "push",
          [](Detokenizer& d, const py::bytes& bytes) { return d.push(std::string_view(bytes)); },
          py::arg("bytes"))
      .def("finish", &Detokenizer::finish)
      .def_property_readonly("stopped", &Detokenizer::stopped);

  py::class_<Trace, std::shared_ptr<Trace>>(m, "Trace", "What is written down of a sequence.")
      .def(py::init([](std::optional<int32_t> n_top, bool prompt, std::optional<int32_t> every) {
             return std::make_shared<Trace>(
                 TraceOptions{n_top.value_or(-1), prompt, every.value_or(0)});
           }),
           py::kw_only(), py::arg("n_top"), py::arg("prompt"), py::arg("kept_every"))
      .def_property_readonly("n_logprobs", &Trace::n_logprobs)
      .def("logprobs", &logprobs, py::arg("begin"), py::arg("end"))
      .def("kept", &kept_of);
}

}  // namespace h2o::python
