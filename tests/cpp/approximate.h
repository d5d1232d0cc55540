// Numbers with bounds of a device's errors in them.
#pragma once

#include <cmath>
#include <cstdint>

#include "bounds.h"

namespace h2o {

// A number and the bound of the device's error in it.
struct Approximate {
  double value = 0, error = 0;
};

inline Approximate operator*(const Approximate& x, const Approximate& y) {
  const double value = x.value * y.value;
  const double error =
      std::abs(x.value) * y.error + std::abs(y.value) * x.error + x.error * y.error;
  return {value, error + (std::abs(value) + error) * kUnit};
}

// The sum of n terms in any order, whose products may be rounded or not.
class Sum {
 public:
  void add(const Approximate& term) {
    value_ += term.value;
    error_ += term.error;
    size_ += std::abs(term.value) + term.error;
    ++n_;
  }
  Approximate result() const { return {value_, error_ + gamma(n_) * size_}; }

 private:
  double value_ = 0, error_ = 0, size_ = 0;
  int64_t n_ = 0;
};

// sigmoid and e^x have a derivative of at most 1 (for x <= 0).
inline Approximate sigmoid(const Approximate& x) {
  const double value = 1 / (1 + std::exp(-x.value));
  return {value, x.error / 4 + value * (power_error(x.value) + 3 * kUnit)};
}

// log(1 + e^x), computed in floats as written from an x that was rounded once.
inline Approximate softplus(double x) {
  const double value = x > 20 ? x : std::log1p(std::exp(x));
  // The derivative is at most 1; then log1p and e^x.
  return {value, (std::abs(x) + (3 + power_error(x) / kUnit) * value) * kUnit};
}

// e^x for x <= 0
inline Approximate power(const Approximate& x) {
  const double value = std::exp(x.value);
  return {value, value * (x.error + power_error(x.value))};
}

}  // namespace h2o
