// The extension module: exceptions, registration of its parts, and shared functions.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "backend/make_backend.h"
#include "core/error.h"
#include "cpu/isa/detect.h"
#include "cuda/cuda_backend.h"
#include "model/session.h"
#include "register.h"
#include "vulkan/vulkan_backend.h"

namespace py = pybind11;

namespace h2o::python {

py::str decoded(std::string_view text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape"));
}

py::tuple kept_arrays(const std::vector<KvEntry>& entries) {
  const auto n = std::ssize(entries);
  py::array_t<int32_t> positions(n);
  py::array_t<float> scores(n);
  for (py::ssize_t i = 0; i < n; ++i) {
    positions.mutable_at(i) = entries[i].position;
    scores.mutable_at(i) = entries[i].score;
  }
  return py::make_tuple(positions, scores);
}

}  // namespace h2o::python

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of h2o_cpp.";
  m.attr("__version__") = H2O_VERSION;
  m.attr("DEFAULT_N_CTX") = h2o::kDefaultContext;

  // pybind11 translates std::bad_alloc to MemoryError.
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const h2o::InvalidArgument& e) {
      // A message may quote names from files or file systems, which may not be UTF-8.
      const std::string_view what = e.what();
      const auto size = static_cast<py::ssize_t>(what.size());
      const auto message = py::reinterpret_steal<py::object>(
          PyUnicode_DecodeUTF8(what.data(), size, "backslashreplace"));
      PyErr_SetObject(PyExc_ValueError, message.ptr());
    } catch (const h2o::FileError& e) {
      errno = e.error_number();
      PyErr_SetFromErrnoWithFilename(PyExc_OSError, e.path().c_str());
    }
  });

  m.def(
      "isas",
      [] {
        py::list names;
        for (const h2o::CpuKernels* kernels : h2o::supported_kernels()) names.append(kernels->isa);
        return names;
      },
      "Instruction sets this CPU can run, fastest first.");
  m.def("cuda_device_count", &h2o::cuda_device_count, "CUDA devices this build can use here.");
  m.def("vulkan_device_count", &h2o::vulkan_device_count,
        "Vulkan devices this build can use here.");
  m.def("default_n_batch", &h2o::default_rows, py::arg("device"),
        "Tokens per chunk by default, on a device that need not exist.");
  m.def(
      "auto_device",
      [](size_t n_bytes) {
        const h2o::AutoDevice device = [&] {
          const py::gil_scoped_release release;
          return h2o::auto_device(n_bytes);
        }();
        return py::make_tuple(device.name, device.reason, device.warns);
      },
      py::arg("n_bytes"), "The device that \"auto\" is, why, and whether that is a warning.");

  h2o::python::register_dtype(m);
  h2o::python::register_gguf(m);
  h2o::python::register_policy(m);
  h2o::python::register_kv_cache(m);
  h2o::python::register_machine(m);
  h2o::python::register_quantize(m);
  h2o::python::register_sampler(m);
  h2o::python::register_session(m);
  h2o::python::register_tokenizer(m);
  h2o::python::register_trace(m);
  h2o::python::register_mailbox(m);
  h2o::python::register_engine(m);
}
