// Sessions of the tiny model for the tests.
#pragma once

#include <memory>
#include <vector>

#include "device_rig.h"
#include "model/session.h"
#include "testing.h"

namespace h2o {

// A model of the repository, on the test device.
inline std::shared_ptr<Model> load(const char* path, int n_threads) {
  return std::make_shared<Model>(path, test_backend(n_threads));
}
inline std::shared_ptr<Model> tiny_model(int n_threads) {
  return load(H2O_SOURCE_DIR "/models/tiny-opt.gguf", n_threads);
}

inline std::vector<int32_t> random_tokens(Random& random, const Model& model, int64_t n) {
  std::vector<int32_t> tokens(n);
  for (int32_t& token : tokens) token = random.integer(0, model.config.n_vocab - 1);
  return tokens;
}

// The logits after the tokens of one sequence, as a copy.
inline std::vector<float> feed(Session& session, int32_t sequence,
                               const std::vector<int32_t>& tokens) {
  const Input input{sequence, tokens};
  const std::span<const float> logits = session.step({&input, 1});
  return {logits.begin(), logits.end()};
}

}  // namespace h2o
