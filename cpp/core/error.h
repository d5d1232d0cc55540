// The exceptions of the library. Messages read "[operation] what was passed, what was expected".
//
//   std::exception          Python
//   ├─ InvalidArgument      ValueError        a mistake of the caller
//   │  ├─ ContextFull       ContextFullError  a ValueError
//   │  └─ FormatError       ValueError        an invalid file
//   ├─ FileError            OSError           FileNotFoundError, PermissionError, ...
//   ├─ OutOfMemory          MemoryError
//   └─ DeviceError          RuntimeError
#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "core/format.h"

namespace h2o {

// A caller's mistake: an option, a shape, a token.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// More tokens than fit in the context.
class ContextFull : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

// Invalid file content.
class FormatError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

// The operating system could not open the file.
class FileError : public std::runtime_error {
 public:
  FileError(int error_number, std::string path)
      : std::runtime_error(
            concat("cannot open ", path, ": ", std::generic_category().message(error_number))),
        error_number_(error_number),
        path_(std::move(path)) {}
  int error_number() const { return error_number_; }  // errno
  const std::string& path() const { return path_; }

 private:
  int error_number_;
  std::string path_;
};

// A failed allocation, with the requested size.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// A failed or unsupported device.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws InvalidArgument unless `condition` is true.
template <class... Parts>
void require(bool condition, const Parts&... message) {
  if (!condition) throw InvalidArgument(concat(message...));
}

}  // namespace h2o
