// Descriptor: an open file of a POSIX system.
#pragma once

#include <unistd.h>

namespace h2o {

struct Descriptor {
  const int value;  // negative: it could not be opened

  explicit Descriptor(int opened) : value(opened) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value >= 0) close(value);
  }
};

}  // namespace h2o
