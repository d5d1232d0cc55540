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

// What of q and k is normalised, before rotation: each head by itself, or all heads together.
enum class QkNorm { none, heads, whole };

// The defaults are what most families do.
struct Family {
  std::string_view architecture;  // general.architecture, and the prefix of the metadata keys
  NormKind norm = NormKind::rms;
  RopeLayout rope = RopeLayout::halves;  // none: learned positions
  Activation activation = Activation::swiglu;
  Biases biases = Biases::optional;
  QkNorm qk_norm = QkNorm::none;
  bool parallel_residual = false;  // unless {a}.use_parallel_residual says otherwise
  int32_t window_period = 0;  // see SlidingWindow; {a}.attention.sliding_window_pattern is first
  bool experts = false;       // the feed-forward block may be a mixture of experts
  bool experts_normalized = true;  // whose weights sum to 1, unless {a}.expert_weights_norm says no
};

// Throws FormatError, listing the families there are, for another architecture.
const Family& find_family(std::string_view architecture);

// Those that find_family knows.
std::vector<std::string_view> architectures();

}  // namespace h2o
