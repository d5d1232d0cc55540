// Models and sessions of the C API for the tests, on the test device.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "capi/h2o.hpp"
#include "device_rig.h"

namespace h2o {

inline const std::string kTinyModel = H2O_SOURCE_DIR "/models/tiny-opt.gguf";
inline const std::string kRotaryModel = H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf";

inline api::Model load_model(const std::string& path = kTinyModel, int32_t n_threads = 1) {
  h2o_model_options options = H2O_MODEL_OPTIONS;
  options.device = test_device().c_str();
  options.n_threads = n_threads;
  return api::Model(path, options);
}

inline h2o_session_options with_budget(double hh, int32_t n_ctx = 0) {
  h2o_session_options options = H2O_SESSION_OPTIONS;
  options.hh = hh;
  options.n_ctx = n_ctx;
  options.n_batch = 32;
  return options;
}

// A session whose next stream is reproducible.
inline api::Session open_session(const api::Model& model, const h2o_session_options& options,
                                 uint64_t seed = 1) {
  api::Session session(model, options);
  h2o_sampling sampling = H2O_SAMPLING;
  sampling.seeded = 1;
  sampling.seed = seed;
  session.set_sampling(sampling);
  return session;
}

inline h2o_stream_options up_to(int32_t max_tokens) {
  h2o_stream_options options = H2O_STREAM_OPTIONS;
  options.max_tokens = max_tokens;
  options.ignore_end = 1;
  return options;
}

// The options of a request, with the sampling and limits that they point to.
struct RequestOptions {
  explicit RequestOptions(int32_t max_tokens, uint64_t seed = 1) : limits(up_to(max_tokens)) {
    sampling.seeded = 1;
    sampling.seed = seed;
    request.sampling = &sampling;
    request.limits = &limits;
  }
  RequestOptions(const RequestOptions&) = delete;

  h2o_sampling sampling = H2O_SAMPLING;
  h2o_stream_options limits;
  h2o_request_options request = H2O_REQUEST_OPTIONS;
};

// The text of a stream.
inline std::string streamed(api::Session& session, std::string_view prompt,
                            const h2o_stream_options& options,
                            h2o_generation* generation = nullptr) {
  std::string text;
  const auto on_piece = [&](std::string_view piece) {
    text += piece;
    return true;
  };
  const h2o_generation got = session.stream(prompt, on_piece, options);
  if (generation != nullptr) *generation = got;
  return text;
}

}  // namespace h2o
