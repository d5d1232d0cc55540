// Model: a GGUF file made ready on a back end. Sessions share it.
#pragma once

#include <filesystem>
#include <memory>
#include <mutex>

#include "core/backend.h"
#include "core/error.h"
#include "io/gguf_model.h"
#include "model/config.h"
#include "model/snapshot.h"
#include "model/weights.h"

namespace h2o {

struct Model {
  // At most max_resident bytes of the weights are in memory at a time, if it is not 0: on back ends
  // that read them from the mapped file. Throws FileError, FormatError, InvalidArgument,
  // OutOfMemory, and what `progress` throws.
  Model(const std::filesystem::path& path, std::unique_ptr<Backend> on,
        const LoadProgress& progress = nullptr, size_t max_resident = 0)
      : file(path),
        config(read_config(file)),
        backend(std::move(on)),
        weights(load_weights(file, config, *backend, progress)),
        fingerprint(h2o::fingerprint(file)) {
    require(max_resident == 0 || backend->maps_weights(), "[weights] max_resident: back end ",
            backend->name(), " has copies of the weights");
    if (max_resident > 0) {
      weights.stream = std::make_unique<WeightStream>(file, config.n_layers, max_resident);
    } else if (backend->maps_weights()) {
      // The first tokens need every weight; and memory then stands still while text is generated.
      file.populate();
    }
  }

  GgufModel file;
  Config config;
  std::unique_ptr<Backend> backend;
  Weights weights;
  uint64_t fingerprint;  // of snapshots
  std::mutex mutex;      // a back end runs one forward pass at a time
};

}  // namespace h2o
