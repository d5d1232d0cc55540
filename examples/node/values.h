// Conversion between JavaScript and C++ values. On failure a JavaScript exception is pending.
#pragma once

#include <h2o.h>
#include <node_api.h>

#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

namespace h2o_node {

// Thrown in C++ while a JavaScript exception is pending, which is raised on return to JavaScript.
struct Pending {};

inline void check(napi_env env, napi_status status) {
  if (status == napi_ok) return;
  bool pending = false;
  napi_is_exception_pending(env, &pending);
  const napi_extended_error_info* info = nullptr;
  napi_get_last_error_info(env, &info);
  if (!pending) {
    napi_throw_error(env, nullptr,
                     info->error_message != nullptr ? info->error_message : "Node-API failed");
  }
  throw Pending();
}

[[noreturn]] inline void type_error(napi_env env, const std::string& message) {
  napi_throw_type_error(env, nullptr, message.c_str());
  throw Pending();
}

inline napi_value string(napi_env env, const char* text, size_t n_bytes = NAPI_AUTO_LENGTH) {
  napi_value value;
  check(env, napi_create_string_utf8(env, text, n_bytes, &value));
  return value;
}
inline napi_value number(napi_env env, double x) {
  napi_value value;
  check(env, napi_create_double(env, x, &value));
  return value;
}
inline void set(napi_env env, napi_value object, const char* name, napi_value value) {
  check(env, napi_set_named_property(env, object, name, value));
}

// A typed array of n elements of 4 bytes each.
inline napi_value array(napi_env env, napi_typedarray_type type, const void* data, size_t n) {
  void* to = nullptr;
  napi_value buffer, value;
  check(env, napi_create_arraybuffer(env, n * 4, &to, &buffer));
  if (n > 0) std::memcpy(to, data, n * 4);
  check(env, napi_create_typedarray(env, type, n, buffer, 0, &value));
  return value;
}

// An Error whose code is the name of the status.
inline napi_value error_of(napi_env env, h2o_status status, const std::string& message) {
  static const char* const kNames[] = {"H2O_OK",         "H2O_INVALID_ARGUMENT", "H2O_CANNOT_OPEN",
                                       "H2O_BAD_FORMAT", "H2O_OUT_OF_MEMORY",    "H2O_CONTEXT_FULL",
                                       "H2O_CANCELLED",  "H2O_TOO_SMALL",        "H2O_BUSY"};
  const bool known = status >= 0 && status < h2o_status(std::size(kNames));
  napi_value error;
  check(env, napi_create_error(
                 env, string(env, known ? kNames[status] : "H2O_INTERNAL_ERROR"),
                 string(env, message.empty() ? h2o_status_text(status) : message.c_str()), &error));
  return error;
}
inline void check(napi_env env, h2o_status status, const char* message) {
  if (status == H2O_OK) return;
  napi_throw(env, error_of(env, status, message));
  throw Pending();
}

inline std::string text_of(napi_env env, napi_value value, const std::string& what) {
  size_t n = 0;
  if (napi_get_value_string_utf8(env, value, nullptr, 0, &n) != napi_ok) {
    type_error(env, what + ": expected a string");
  }
  std::string text(n, '\0');
  check(env, napi_get_value_string_utf8(env, value, text.data(), n + 1, &n));
  return text;
}
inline double number_of(napi_env env, napi_value value, const std::string& what) {
  double x = 0;
  if (napi_get_value_double(env, value, &x) != napi_ok)
    type_error(env, what + ": expected a number");
  return x;
}
inline int32_t integer_of(napi_env env, napi_value value, const std::string& what) {
  const double x = number_of(env, value, what);
  if (!(std::fabs(x) <= std::numeric_limits<int32_t>::max()) || x != std::trunc(x)) {
    type_error(env, what + ": expected a 32-bit integer");
  }
  return static_cast<int32_t>(x);
}

// The properties of an options object; undefined ones leave the value unchanged.
class Options {
 public:
  Options(napi_env env, napi_value object) : env_(env), object_(object) {
    napi_valuetype type;
    check(env, napi_typeof(env, object, &type));
    is_given_ = type != napi_undefined;
    if (is_given_ && type != napi_object) type_error(env, "options: expected an object");
  }
  void read(const char* name, double& to) const {
    if (napi_value value; find(name, &value)) to = number_of(env_, value, name);
  }
  void read(const char* name, float& to) const {
    if (napi_value value; find(name, &value)) to = static_cast<float>(number_of(env_, value, name));
  }
  void read(const char* name, int32_t& to) const {
    if (napi_value value; find(name, &value)) to = integer_of(env_, value, name);
  }
  bool read(const char* name, uint64_t& to) const {
    napi_value value;
    if (!find(name, &value)) return false;
    const double x = number_of(env_, value, name);
    if (!(x >= 0 && x <= 0x1p53) || x != std::trunc(x)) {
      type_error(env_, std::string(name) + ": expected an integer from 0 to 2^53");
    }
    to = static_cast<uint64_t>(x);
    return true;
  }
  void read_flag(const char* name, int32_t& to) const {
    napi_value value;
    bool flag = false;
    if (!find(name, &value)) return;
    if (napi_get_value_bool(env_, value, &flag) != napi_ok) {
      type_error(env_, std::string(name) + ": expected true or false");
    }
    to = flag ? 1 : 0;
  }
  bool read(const char* name, std::string& to) const {
    napi_value value;
    if (!find(name, &value)) return false;
    to = text_of(env_, value, name);
    return true;
  }
  void read(const char* name, std::vector<std::string>& to) const {
    napi_value list;
    uint32_t n = 0;
    if (!find(name, &list)) return;
    if (napi_get_array_length(env_, list, &n) != napi_ok) {
      type_error(env_, std::string(name) + ": expected an array of strings");
    }
    for (uint32_t i = 0; i < n; ++i) {
      napi_value item;
      check(env_, napi_get_element(env_, list, i, &item));
      to.push_back(text_of(env_, item, name));
    }
  }

 private:
  bool find(const char* name, napi_value* value) const {
    if (!is_given_) return false;
    check(env_, napi_get_named_property(env_, object_, name, value));
    napi_valuetype type;
    check(env_, napi_typeof(env_, *value, &type));
    return type != napi_undefined;
  }

  napi_env env_;
  napi_value object_;
  bool is_given_ = false;
};

}  // namespace h2o_node
