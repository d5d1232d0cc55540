// Converts the options of h2o.h.
#pragma once

#include "capi/text_session.h"
#include "text/prefix_cache.h"

namespace h2o::capi {

// Each throws InvalidArgument for invalid options; NULL means the defaults.
EngineParts engine_parts(std::shared_ptr<TextModel> model, const h2o_session_options* options,
                         int32_t n_sequences);
PrefixCacheOptions prefix_options(const h2o_session_options* options);
SamplerOptions sampler_options(const h2o_sampling& sampling);
StreamOptions stream_options(const h2o_stream_options* options);

h2o_generation result_of(const Generation& generation);

// A non-deterministic seed.
uint64_t random_seed();

}  // namespace h2o::capi
