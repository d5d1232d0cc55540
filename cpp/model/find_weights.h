// find_weights: what each tensor of a model file is.
#pragma once

#include "io/gguf_shards.h"
#include "model/config.h"
#include "model/weights.h"

namespace h2o {

// The weights as views of the mapped file; of the rotary frequencies only the divisors. Throws
// FormatError naming the tensor, its shape or type and the expected one; also for unused tensors.
Weights find_weights(const GgufShards& model, const Config& config);

// The weights of the first of the config's n_unused_layers, with its fusion and norm, and its own
// embeddings and output, if it has any. Throws FormatError.
Weights find_predictor(const GgufShards& model, const Config& config);

}  // namespace h2o
