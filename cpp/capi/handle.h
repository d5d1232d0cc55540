// Handle: serializes calls with a handle of the C API, and converts exceptions to a status and a
// message.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "capi/h2o.h"
#include "core/error.h"

namespace h2o::capi {

// A status that does not correspond to an exception of the library.
struct Failure {
  h2o_status status;
  std::string message;
};

// Read-only calls may also be made from a callback, on the thread whose call is in progress.
enum class Access { look, change };

class Handle {
 public:
  // Calls `body`, which may throw, and returns a status.
  template <class Body>
  h2o_status call(Access access, Body body) noexcept {
    std::thread::id owner;  // no thread
    const bool first = owner_.compare_exchange_strong(owner, std::this_thread::get_id());
    if (!first && !(access == Access::look && owner == std::this_thread::get_id())) return H2O_BUSY;
    h2o_status status = H2O_OK;
    try {
      message_[0] = '\0';
      body();
    } catch (...) {
      status = keep_message();
    }
    if (first) owner_ = std::thread::id();
    return status;
  }

  // Blocks calls permanently, so that the handle can be freed; false if one is in progress.
  bool retire() noexcept {
    std::thread::id owner;
    return owner_.compare_exchange_strong(owner, std::this_thread::get_id());
  }

  const char* message() const noexcept { return message_; }

 private:
  h2o_status keep_message() noexcept;  // of the current exception

  std::atomic<std::thread::id> owner_{};  // thread whose call is in progress
  char message_[512] = "";
};

// Options from the caller: those of an older h2o.h are shorter, and the remaining fields get the
// defaults.
template <class Options>
Options given(const Options* options, Options defaults) {
  if (options == nullptr) return defaults;
  require(options->size >= sizeof(size_t) && options->size <= sizeof(Options),
          "a structure of size ", options->size, ", expected ", sizeof(size_t), " to ",
          sizeof(Options), ": initialize it with the macro of its name");
  std::memcpy(&defaults, options, options->size);
  return defaults;
}

// Fills in the caller's structure, up to its size.
template <class Result>
void give(Result value, Result* out) {
  require(out != nullptr, "the structure for the result is NULL");
  value.size = given(out, value).size;
  std::memcpy(out, &value, value.size);
}

// Copies results to the caller's array.
template <class T>
void give(const T* values, size_t n, T* out, size_t capacity, size_t* n_out) {
  require(n_out != nullptr, "the pointer to the number of results is NULL");
  require(out != nullptr || capacity == 0, "an array of ", capacity, " elements is NULL");
  *n_out = n;
  if (n > capacity)
    throw Failure{H2O_TOO_SMALL, concat(n, " elements, the capacity is ", capacity)};
  if (n > 0) std::memcpy(out, values, n * sizeof(T));
}

// Copies text to the caller's array, with a terminating NUL.
inline void give_text(const std::string& text, char* out, size_t capacity, size_t* n_bytes) {
  require(n_bytes != nullptr, "the pointer to the number of bytes is NULL");
  size_t n_with_nul = 0;
  *n_bytes = text.size();
  give(text.c_str(), text.size() + 1, out, capacity, &n_with_nul);
}

// The caller's array or text.
template <class T>
std::span<const T> given(const T* values, size_t n) {
  require(values != nullptr || n == 0, "an array of ", n, " elements is NULL");
  require(n <= PTRDIFF_MAX / sizeof(T), "an array of ", n, " elements");
  return {values, n};
}
inline std::string_view given(const char* text, size_t n_bytes) {
  const std::span<const char> bytes = given<char>(text, n_bytes);
  return {bytes.data(), bytes.size()};
}

}  // namespace h2o::capi
