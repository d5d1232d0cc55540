// What differs between model families: one table row for each.
#pragma once

#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace h2o {

enum class NormKind { layer, rms };
enum class Activation { relu, gelu, swiglu };

// Which projections must have a bias. Others may: a bias in the file is used.
enum class Biases { optional, qkv, all };

struct Family {
  std::string_view architecture;  // general.architecture, and the prefix of the metadata keys
  NormKind norm;
  RopeLayout rope;  // none: learned positions
  Activation activation;
  Biases biases;
  bool qk_norm;               // q and k are normalised per head, before rotation
  bool parallel_residual;     // unless {a}.use_parallel_residual says otherwise
  int32_t window_period = 0;  // see SlidingWindow, unless {a}.attention.sliding_window_pattern is
                              // there
};

// Throws FormatError, listing the families there are, for another architecture.
const Family& find_family(std::string_view architecture);

// Those that find_family knows.
std::vector<std::string_view> architectures();

}  // namespace h2o
