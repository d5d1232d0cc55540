// Creates a Sampler for a model's tokenizer.
#pragma once

#include "text/sampler.h"
#include "text/tokenizer/tokenizer.h"

namespace h2o {

// Resolves options that depend on the vocabulary and the context. Throws InvalidArgument.
Sampler make_sampler(SamplerOptions options, const Tokenizer& tokenizer, int32_t n_vocab,
                     int32_t n_ctx);

}  // namespace h2o
