#include "model/predictor.h"

#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace h2o {

std::shared_ptr<Model> next_token_predictor(const std::shared_ptr<Model>& model) {
  const Config& c = model->config;
  require(c.n_unused_layers > 0, model->file.path(),
          " has no layers for multi-token prediction: ", c.family->architecture,
          ".nextn_predict_layers is 0 or missing");
  require(c.family->predicts, "layers for multi-token prediction of ", c.family->architecture,
          " are not supported");
  Config config = c;  // of a layer behind the last
  config.predicts = true;
  config.recurrent_layers.clear();
  config.attention_layers.clear();
  config.ff_layers.clear();
  const std::string router = concat("blk.", c.n_layers, ".ffn_gate_inp.weight");
  config.mixture.n_dense = model->file.tensor(router, 1) ? 0 : c.n_layers + 1;
  if (std::vector<bool>& slides = config.sliding_window.layers; !slides.empty()) {
    // Files may have flags of the other layers only; it is then like the first.
    slides = {slides[std::ssize(slides) > c.n_layers ? c.n_layers : 0]};
  }
  Weights weights = load_predictor(model->file, config, model->weights, *model->backend);
  config.delta_net = {};
  config.n_layers = 1;
  config.n_unused_layers = 0;
  return std::make_shared<Model>(model, std::move(config), std::move(weights));
}

}  // namespace h2o
