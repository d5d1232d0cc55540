// Kernels of the element types for Python, so that tests can compare them with gguf-py's.
#include <pybind11/numpy.h>

#include <cstring>
#include <memory>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "cpu/cpu_backend.h"
#include "cpu/isa/detect.h"
#include "register.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

py::list dtypes() {
  py::list names;
  for (DType dtype : computable_dtypes()) names.append(info(dtype).name);
  return names;
}

DType computable(const std::string& name) {
  if (const auto dtype = find_dtype(name, computable_dtypes())) return *dtype;
  throw InvalidArgument(
      concat("[dtype] '", name, "' is not one of ", dtype_names(computable_dtypes())));
}

// A copy with the alignment of weights.
std::vector<std::byte> copy(const Bytes& data) {
  std::vector<std::byte> bytes(data.size());
  if (!bytes.empty()) std::memcpy(bytes.data(), data.data(), bytes.size());
  return bytes;
}

Floats dequantize(const std::string& dtype, const Bytes& data, const std::string& isa) {
  const DType type = computable(dtype);
  const CpuKernels& kernels = choose_kernels(isa);
  const DTypeInfo& layout = info(type);
  require(data.ndim() == 1 && data.size() % layout.block_bytes == 0, "[dequantize] ", data.size(),
          " bytes in ", data.ndim(), " dimensions, expected one of blocks of ", layout.block_bytes);
  const int64_t n = data.size() / layout.block_bytes * layout.block_size;
  const std::vector<std::byte> bytes = copy(data);
  Floats y(n);
  float* values = y.mutable_data();
  {
    const py::gil_scoped_release release;
    kernels.of(type).decode(values, bytes.data(), n);
  }
  return y;
}

// y[n, n_out] = x[n, n_in] w[n_out, n_in]^T
Floats matmul(const std::string& dtype, const Bytes& w, int32_t n_out, int32_t n_in,
              const Floats& x, const std::string& isa) {
  const DType type = computable(dtype);
  const std::unique_ptr<Backend> backend = make_cpu_backend(1, isa);
  const DTypeInfo& layout = info(type);
  require(n_out > 0 && n_in > 0 && n_in % layout.block_size == 0, "[matmul] w is [", n_out, ", ",
          n_in, "], expected rows of one or more blocks of ", layout.block_size);
  const int64_t row_bytes = byte_size(type, n_in);
  require(w.ndim() == 1 && w.size() % n_out == 0 && w.size() / n_out == row_bytes,
          "[matmul] w has ", w.size(), " bytes in ", w.ndim(), " dimensions, expected one of ",
          n_out, " rows of ", row_bytes);
  require(x.ndim() == 2 && x.shape(1) == n_in, "[matmul] x has ", x.ndim(), " dimensions and ",
          x.size(), " elements, expected [n, ", n_in, "]");
  std::vector<std::byte> bytes = copy(w);
  Floats y({x.shape(0), py::ssize_t{n_out}});
  const auto floats = [](const float* data, py::ssize_t rows, int64_t cols) {
    auto* to = reinterpret_cast<std::byte*>(const_cast<float*>(data));
    return Tensor{to, DType::f32, rows, cols};
  };
  const Tensor x_tensor = floats(x.data(), x.shape(0), n_in);
  const Tensor y_tensor = floats(y.mutable_data(), x.shape(0), n_out);
  {
    const py::gil_scoped_release release;
    backend->matmul(y_tensor, x_tensor, {{bytes.data(), type, n_out, n_in}, {}});
  }
  return y;
}

}  // namespace

void register_dtype(py::module_& m) {
  m.def("dtypes", &dtypes, "The GGUF types that the kernels compute on.");
  m.def("dequantize", &dequantize, py::arg("dtype"), py::arg("data"), py::arg("isa") = "",
        "Whole blocks as floats, by the kernels of an instruction set (the fastest: '').");
  m.def("matmul", &matmul, py::arg("dtype"), py::arg("w"), py::arg("n_out"), py::arg("n_in"),
        py::arg("x"), py::arg("isa") = "", "x times the rows of w: [n, n_in] to [n, n_out].");
}

}  // namespace h2o::python
