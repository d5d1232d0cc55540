// The quantizer for Python: rows of float32 to rows of blocks.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <span>

#include "core/error.h"
#include "quantize/quantize.h"
#include "register.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

DType quantizable(const std::string& name) {
  if (const auto dtype = find_dtype(name, quantizable_types())) return *dtype;
  throw InvalidArgument(concat("[quantize] type is '", name, "', expected one of ",
                               dtype_names(quantizable_types())));
}

py::array_t<uint8_t> quantize(const std::string& name, const Floats& values, int n_threads,
                              const std::optional<Floats>& importance) {
  const DType dtype = quantizable(name);
  require(values.ndim() == 2, "[quantize] an array of ", values.ndim(), " dimensions, expected 2");
  const py::ssize_t n_rows = values.shape(0), n_cols = values.shape(1);
  py::array_t<uint8_t> out({n_rows, static_cast<py::ssize_t>(byte_size(dtype, n_cols))});
  auto* bytes = reinterpret_cast<std::byte*>(out.mutable_data());
  std::span<const float> counts;
  if (importance) counts = {importance->data(), static_cast<size_t>(importance->size())};
  const py::gil_scoped_release release;
  quantize_rows(dtype, bytes, values.data(), n_rows, n_cols, n_threads, counts);
  return out;
}

}  // namespace

void register_quantize(py::module_& m) {
  m.def("quantize", &quantize, py::arg("dtype"), py::arg("values"), py::kw_only(),
        py::arg("threads"), py::arg("importance") = py::none(),
        "Rows of weights as blocks of a GGUF type; the same for any number of threads.");
}

}  // namespace h2o::python
