// The tokenizer for Python: text is str, tokens are any integers. Releases the GIL.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "core/error.h"
#include "register.h"
#include "text/tokenizer/tokenizer.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

// Valid as long as `text`.
std::string_view utf8(const py::str& text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (data == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_UnicodeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    throw InvalidArgument("text is not valid Unicode: it has a surrogate without its pair");
  }
  return {data, static_cast<size_t>(size)};
}

int32_t token_of(const Tokenizer& tokenizer, py::handle object) {
  const auto number = py::reinterpret_steal<py::int_>(PyNumber_Index(object.ptr()));
  if (!number) throw py::error_already_set();
  int overflow = 0;
  const long long token = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  const int32_t n_vocab = tokenizer.vocabulary().size();
  require(overflow == 0 && token >= 0 && token < n_vocab, "token ",
          py::str(number).cast<std::string>(), " is not in the vocabulary of ", n_vocab);
  return static_cast<int32_t>(token);
}

std::vector<int32_t> tokens_of(const Tokenizer& tokenizer, const py::iterable& objects) {
  std::vector<int32_t> tokens;
  for (const py::handle object : objects) tokens.push_back(token_of(tokenizer, object));
  return tokens;
}

py::object token_or_none(int32_t token) {
  return token < 0 ? py::object(py::none()) : py::object(py::int_(token));
}

std::vector<int32_t> encode(const Tokenizer& tokenizer, const py::str& text, bool add_special,
                            bool parse_special, bool begins, std::optional<size_t> most) {
  const std::string_view view = utf8(text);
  const py::gil_scoped_release release;
  return tokenizer.encode(view, {add_special, parse_special, begins, most.value_or(SIZE_MAX)});
}

py::str decode(const Tokenizer& tokenizer, const py::iterable& tokens) {
  const std::vector<int32_t> found = tokens_of(tokenizer, tokens);
  std::string text;
  {
    const py::gil_scoped_release release;
    text = tokenizer.decode(found);
  }
  return text;
}

bool has_text(const Tokenizer& tokenizer, const py::iterable& tokens) {
  for (const py::handle token : tokens) {
    if (!tokenizer.token_bytes(token_of(tokenizer, token)).empty()) return true;
  }
  return false;
}

// The number of bytes of each token's text, int32 [n]; 0 for special ones.
py::array_t<int32_t> byte_lengths(const Tokenizer& tokenizer, const py::iterable& tokens) {
  std::vector<int32_t> found = tokens_of(tokenizer, tokens);
  for (int32_t& one : found) one = static_cast<int32_t>(tokenizer.token_bytes(one).size());
  return py::array_t<int32_t>(static_cast<py::ssize_t>(found.size()), found.data());
}

// Special tokens as ids, the text between them as str.
py::list split_special(const Tokenizer& tokenizer, const py::str& text) {
  py::list parts;
  tokenizer.split_special(
      utf8(text), [&](std::string_view part) { parts.append(py::str(part.data(), part.size())); },
      [&](int32_t token) { parts.append(token); });
  return parts;
}

py::list special_texts(const Tokenizer& tokenizer) {
  py::list texts;
  for (const TokenTable::Entry& entry : tokenizer.special().entries()) {
    texts.append(decoded(entry.text));
  }
  return texts;
}

}  // namespace

void register_tokenizer(py::module_& m) {
  py::class_<Tokenizer, std::shared_ptr<Tokenizer>>(
      m, "Tokenizer", "Text to tokens and back, by a file's vocabulary.")
      .def(py::init<const GgufFile&, int32_t>(), py::keep_alive<1, 2>(), py::arg("file"),
           py::arg("n_vocab"))
      .def("encode", &encode, py::arg("text"), py::kw_only(), py::arg("add_special"),
           py::arg("parse_special"), py::arg("begins"), py::arg("most"))
      .def("decode", &decode, py::arg("tokens"))
      .def(
          "token_bytes",
          [](const Tokenizer& tokenizer, py::handle token, bool begins) {
            return py::bytes(tokenizer.token_bytes(token_of(tokenizer, token), begins));
          },
          py::arg("token"), py::kw_only(), py::arg("begins"))
      .def("byte_lengths", &byte_lengths, py::arg("tokens"))
      .def(
          "token_text",
          [](const Tokenizer& tokenizer, py::handle token) {
            return decoded(tokenizer.vocabulary().tokens[token_of(tokenizer, token)]);
          },
          py::arg("token"))
      .def("has_text", &has_text, py::arg("tokens"))
      .def("split_special", &split_special, py::arg("text"))
      .def_property_readonly("special_texts", &special_texts)
      .def_property_readonly("warnings", &Tokenizer::warnings)
      .def_property_readonly(
          "n_vocab", [](const Tokenizer& tokenizer) { return tokenizer.vocabulary().size(); })
      .def_property_readonly(
          "bos", [](const Tokenizer& tokenizer) { return token_or_none(tokenizer.bos()); })
      .def_property_readonly(
          "eos", [](const Tokenizer& tokenizer) { return token_or_none(tokenizer.eos()); })
      .def_property_readonly(
          "end_tokens",
          [](const Tokenizer& tokenizer) { return tokenizer.vocabulary().end_tokens; })
      .def_property_readonly("beginning",
                             [](const Tokenizer& tokenizer) {
                               const std::span<const int32_t> tokens = tokenizer.beginning();
                               return std::vector(tokens.begin(), tokens.end());
                             })
      .def_property_readonly("chat_template",
                             [](const Tokenizer& tokenizer) -> py::object {
                               const std::optional<std::string_view> found =
                                   tokenizer.chat_template();
                               return found ? py::object(decoded(*found)) : py::object(py::none());
                             })
      .def_property_readonly("named_templates", [](const Tokenizer& tokenizer) {
        py::dict templates;
        for (const auto& [name, source] : tokenizer.named_templates()) {
          templates[decoded(name)] = decoded(source);
        }
        return templates;
      });
}

}  // namespace h2o::python
