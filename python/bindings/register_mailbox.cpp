// Mailbox for Python: which generations have news.
#include <pybind11/stl.h>

#ifdef _WIN32
#include <winsock2.h>
#else
#include <sys/socket.h>
#endif

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "register.h"
#include "text/generation.h"
#include "text/mailbox.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

// Writes a byte to a non-blocking socket; if it is full, the reader was already notified.
std::shared_ptr<Mailbox> make_mailbox(std::optional<int64_t> socket) {
  if (!socket) return std::make_shared<Mailbox>();
  return std::make_shared<Mailbox>([fd = *socket] {
#ifdef _WIN32
    ::send(static_cast<SOCKET>(fd), "", 1, 0);
#else
#ifdef MSG_NOSIGNAL
    constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
#else
    constexpr int kFlags = MSG_DONTWAIT;
#endif
    [[maybe_unused]] const auto sent = ::send(static_cast<int>(fd), "", 1, kFlags);
#endif
  });
}

std::vector<uintptr_t> keys(const std::vector<std::shared_ptr<Generation>>& generations) {
  std::vector<uintptr_t> found;
  for (const auto& one : generations) found.push_back(reinterpret_cast<uintptr_t>(one.get()));
  return found;
}

}  // namespace

void register_mailbox(py::module_& m) {
  py::class_<Mailbox, std::shared_ptr<Mailbox>>(m, "Mailbox", "Which generations have news.")
      .def(py::init(&make_mailbox), py::arg("socket") = py::none())
      .def("take", [](Mailbox& mailbox) { return keys(mailbox.take()); })
      .def("close", &Mailbox::close, "Nothing is written to the socket afterwards.")
      .def("wait", [](Mailbox& mailbox) {
        const py::gil_scoped_release release;
        mailbox.wait(std::chrono::milliseconds(100));
      });
}

}  // namespace h2o::python
