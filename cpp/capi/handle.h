// Handle: what the calls of the C API do with their handle: keep other calls out, and turn
// exceptions into a status and a message.
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

// A status that no exception of the library stands for.
struct Failure {
  h2o_status status;
  std::string message;
};

// Calls that only look may also be made by the thread whose call is in progress, from a callback.
enum class Access { look, change };

class Handle {
 public:
  // Runs `body`, which may throw, and says what came of it.
  template <class Body>
  h2o_status call(Access access, Body body) noexcept {
    std::thread::id owner;  // of nobody
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

  // Keeps calls out for good, so that the handle can be freed; false if one is in progress.
  bool retire() noexcept {
    std::thread::id owner;
    return owner_.compare_exchange_strong(owner, std::this_thread::get_id());
  }

  const char* message() const noexcept { return message_; }

 private:
  h2o_status keep_message() noexcept;  // of the exception that is being handled

  std::atomic<std::thread::id> owner_{};  // whose call is in progress
  char message_[512] = "";
};

// Options as the caller gave them: those of an older h2o.h are shorter, and have the defaults for
// the rest.
template <class Options>
Options given(const Options* options, Options defaults) {
  if (options == nullptr) return defaults;
  require(options->size >= sizeof(size_t) && options->size <= sizeof(Options),
          "a structure of size ", options->size, ", expected at most ", sizeof(Options));
  std::memcpy(&defaults, options, options->size);
  return defaults;
}

// Fills in a structure of the caller's, as much of it as the caller knows.
template <class Result>
void give(Result value, Result* out) {
  require(out != nullptr, "the structure for the result is NULL");
  value.size = given(out, value).size;
  std::memcpy(out, &value, value.size);
}

// Copies results to an array of the caller's.
template <class T>
void give(const T* values, size_t n, T* out, size_t capacity, size_t* n_out) {
  require(n_out != nullptr, "the number of results goes to NULL");
  require(out != nullptr || capacity == 0, "an array of ", capacity, " elements is NULL");
  *n_out = n;
  if (n > capacity) throw Failure{H2O_TOO_SMALL, text(n, " elements, the capacity is ", capacity)};
  if (n > 0) std::memcpy(out, values, n * sizeof(T));
}

// Copies text to an array of the caller's, with a NUL behind.
inline void give_text(const std::string& text, char* out, size_t capacity, size_t* n_bytes) {
  require(n_bytes != nullptr, "the number of bytes goes to NULL");
  size_t n_with_nul = 0;
  *n_bytes = text.size();
  give(text.c_str(), text.size() + 1, out, capacity, &n_with_nul);
}

// An array or text of the caller's.
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
