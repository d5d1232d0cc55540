// Includes only h2o.h, with an older and a newer C++ standard than the library's.
#include <h2o.h>

int main(int argc, char** argv) {
  h2o_model_options options = H2O_MODEL_OPTIONS;
  h2o_model* model;
  options.device = "cpu";
  options.n_threads = 1;
  if (argc != 2 || h2o_model_load(argv[1], &options, &model) != H2O_OK) return 1;
  return h2o_model_free(model);
}
