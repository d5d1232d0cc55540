// The tokenizer of the C API, so that the tests can compare it with the one of h2o_cpp.tokenizer.
#include <pybind11/stl.h>

#include "register.h"
#include "text/tokenizer/tokenizer.h"

namespace py = pybind11;

namespace h2o::python {

void register_tokenizer(py::module_& m) {
  py::class_<Tokenizer, std::shared_ptr<Tokenizer>>(
      m, "Tokenizer", "Text to tokens and back, as the C API does it.")
      .def(py::init<const GgufFile&, int32_t>(), py::keep_alive<1, 2>(), py::arg("file"),
           py::arg("n_vocab"))
      .def(
          "encode",
          [](const Tokenizer& tokenizer, const std::string& text, bool add_special,
             bool parse_special,
             bool begins) { return tokenizer.encode(text, {add_special, parse_special, begins}); },
          py::arg("text"), py::kw_only(), py::arg("add_special"), py::arg("parse_special"),
          py::arg("begins"))
      .def(
          "decode",
          [](const Tokenizer& tokenizer, const std::vector<int32_t>& tokens) {
            return tokenizer.decode(tokens);
          },
          py::arg("tokens"))
      .def(
          "token_bytes",
          [](const Tokenizer& tokenizer, int32_t token, bool begins) {
            return py::bytes(tokenizer.token_bytes(token, begins));
          },
          py::arg("token"), py::kw_only(), py::arg("begins"))
      .def("ends", &Tokenizer::ends, py::arg("token"));
}

}  // namespace h2o::python
