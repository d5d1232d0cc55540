// A Sampler for the tokens of a tokenizer.
#pragma once

#include "text/sampler.h"
#include "text/tokenizer/tokenizer.h"

namespace h2o {

// With what options mean in a vocabulary, by strings, and in a context. Throws InvalidArgument.
Sampler make_sampler(SamplerOptions options, const Tokenizer& tokenizer, int32_t n_vocab,
                     int32_t n_ctx);

}  // namespace h2o
