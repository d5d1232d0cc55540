// What the options of h2o.h stand for.
#pragma once

#include "capi/text_session.h"

namespace h2o::capi {

// Each throws InvalidArgument for what makes no sense; NULL stands for the defaults.
SessionOptions session_options(const h2o_session_options* options, int32_t n_ctx_train);
SamplerOptions sampler_options(const h2o_sampling& sampling);
StreamOptions stream_options(const h2o_stream_options* options);

}  // namespace h2o::capi
