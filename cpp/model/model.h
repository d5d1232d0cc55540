// Model: a GGUF file made ready on a back end. Sessions share it.
#pragma once

#include <filesystem>
#include <memory>
#include <mutex>

#include "backend/backend.h"
#include "io/gguf_shards.h"
#include "model/config.h"
#include "model/snapshot.h"
#include "model/weights.h"

namespace h2o {

struct Model {
  // At most max_resident bytes of the weights are in the back end's memory at a time, if it is not
  // 0. Throws FileError, FormatError, InvalidArgument, OutOfMemory, and what `progress` throws.
  Model(const std::filesystem::path& path, std::unique_ptr<Backend> on,
        const LoadProgress& progress = nullptr, size_t max_resident = 0)
      : file(path),
        config(read_config(file)),
        fingerprint(h2o::fingerprint(file)),
        backend(std::move(on)),
        weights(load_weights(file, config, *backend, max_resident, progress)) {}

  GgufShards file;
  Config config;
  uint64_t fingerprint;  // of snapshots
  std::unique_ptr<Backend> backend;
  Weights weights;
  std::mutex mutex;  // a back end runs one forward pass at a time
};

}  // namespace h2o
