// Device "auto" of the C API, on the emulated device.
#include <doctest/doctest.h>

#include "capi_rig.h"
#include "control.h"
#include "setting.h"

namespace h2o {
namespace {

using namespace cuda::emulation;

std::string backend_of_auto() {
  h2o_model_options options = H2O_MODEL_OPTIONS;  // the device is NULL
  options.n_threads = 1;
  const std::string by_default = api::Model(kTinyModel, options).info().backend;
  options.device = "auto";
  CHECK(api::Model(kTinyModel, options).info().backend == by_default);
  return by_default;
}

TEST_CASE("a model is loaded on the GPU if it fits, and on the CPU otherwise" *
          doctest::skip(!on_gpu())) {
  CHECK(backend_of_auto().starts_with("cpu"));
  const Setting setting("H2O_CUDA_AUTO", "1");
  CHECK(backend_of_auto().starts_with("cuda (emulated"));
  set_free_memory(1 << 20);  // less than the weights
  CHECK(backend_of_auto().starts_with("cpu"));
  set_free_memory(SIZE_MAX);
  h2o_model_options options = H2O_MODEL_OPTIONS;
  options.device = "auto";
  CHECK_THROWS_WITH_AS(api::Model("/no/such/model.gguf", options),
                       doctest::Contains("/no/such/model.gguf"), api::Error);
}

}  // namespace
}  // namespace h2o
