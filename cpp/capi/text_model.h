// TextModel: a model with its tokenizer. Sessions share it.
#pragma once

#include <string>

#include "backend/make_backend.h"
#include "model/model.h"
#include "text/tokenizer/tokenizer.h"

namespace h2o::capi {

struct TextModel {
  // Throws FileError, FormatError, OutOfMemory, InvalidArgument.
  TextModel(const std::string& path, const std::string& device, int32_t n_threads)
      : model(path, make_backend(device, n_threads)),
        tokenizer(open_tokenizer(model)),
        architecture(model.config.family->architecture),
        backend(model.backend->name()) {}

  Model model;
  const Tokenizer tokenizer;
  const std::string architecture;
  const std::string backend;  // its name

 private:
  static Tokenizer open_tokenizer(const Model& model) {
    try {
      return Tokenizer(model.file.head(), model.config.n_vocab);
    } catch (const FormatError& e) {
      throw FormatError(text(model.file.path(), ": ", e.what()));
    }
  }
};

}  // namespace h2o::capi
