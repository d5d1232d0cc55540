#pragma once

#include <cstdlib>

namespace h2o {

// An environment variable, while this exists.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  ~Setting() { unsetenv(name_); }

 private:
  const char* const name_;
};

}  // namespace h2o
