// The machine for Python.
#include "cpu/machine.h"
#include "register.h"

namespace py = pybind11;

namespace h2o::python {

void register_machine(py::module_& m) {
  m.def("read_bandwidth", &read_bandwidth, py::arg("nbytes"), py::kw_only(), py::arg("threads"),
        py::arg("passes"), py::call_guard<py::gil_scoped_release>(),
        "Bytes per second that the threads together read: the fastest of some passes.");
  m.def("available_memory", &available_memory,
        "Bytes that can be allocated without swapping; in a container, within its limit.");
}

}  // namespace h2o::python
