// Model: a GGUF file loaded on a back end. Shared by sessions.
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
  // max_resident: the limit for weights in the back end's memory, in bytes; 0 = none. Throws
  // FileError, FormatError, InvalidArgument, OutOfMemory, and whatever `progress` throws.
  Model(const std::filesystem::path& path, std::unique_ptr<Backend> on,
        const LoadProgress& progress = nullptr, size_t max_resident = 0)
      : Model(GgufShards(path), std::move(on), progress, max_resident) {}
  Model(GgufShards opened, std::unique_ptr<Backend> on, const LoadProgress& progress = nullptr,
        size_t max_resident = 0)
      : file(std::move(opened)),
        config(read_config(file)),
        fingerprint(h2o::fingerprint(file)),
        backend(std::move(on)),
        weights(load_weights(file, config, *backend, max_resident, progress)) {}

  // A model on the back end of another one, whose weights it uses too.
  Model(std::shared_ptr<Model> other, Config own, Weights some)
      : whole(std::move(other)),
        file(whole->file),
        config(std::move(own)),
        fingerprint(whole->fingerprint),
        backend(whole->backend),
        weights(std::move(some)),
        mutex(whole->mutex) {}

  std::shared_ptr<Model> whole;  // the other one; nullptr: none
  GgufShards file;
  Config config;
  uint64_t fingerprint;  // for snapshots
  std::shared_ptr<Backend> backend;
  Weights weights;

 private:
  std::mutex own_mutex_;

 public:
  std::mutex& mutex = own_mutex_;  // a back end runs one forward pass at a time
};

}  // namespace h2o
