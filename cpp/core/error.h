// The exceptions of the library. Messages read "[operation] what was passed, what was expected".
#pragma once

#include <locale>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace h2o {

// A caller's mistake: an option, a shape, a token. Python: ValueError.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// More tokens than fit in the context. Python: ContextFullError, a ValueError.
class ContextFull : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

// Invalid file content. Python: ValueError.
class FormatError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

// The operating system could not open the file. Python: OSError (FileNotFoundError,
// PermissionError, ...).
class FileError : public std::runtime_error {
 public:
  FileError(int error_number, std::string path)
      : std::runtime_error("cannot open " + path),
        error_number_(error_number),
        path_(std::move(path)) {}
  int error_number() const { return error_number_; }  // errno
  const std::string& path() const { return path_; }

 private:
  int error_number_;
  std::string path_;
};

// A failed allocation, with the requested size. Python: MemoryError.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// A failed or unsupported device. Python: RuntimeError.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Concatenates its arguments into one message: text("[attend] ", n, " rows, at most ", limit).
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());  // not the application's locale, which may group digits
  (out << ... << parts);
  if (!out) throw std::bad_alloc();  // the stream swallows the exception
  return out.str();
}

// A name from a file, shortened and safe to print whatever its bytes: 'name'.
inline std::string quoted(std::string_view name) {
  constexpr size_t kMax = 80;
  std::string out = "'";
  for (char c : name.substr(0, kMax)) out += c >= 0x20 && c < 0x7f ? c : '?';
  return out + (name.size() > kMax ? "...'" : "'");
}

// Throws InvalidArgument unless `condition` is true.
template <class... Parts>
void require(bool condition, const Parts&... message) {
  if (!condition) throw InvalidArgument(text(message...));
}

}  // namespace h2o
