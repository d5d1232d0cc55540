// TextModel: a model with its tokenizer, shared by sessions and engines.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "backend/make_backend.h"
#include "core/utf8.h"
#include "io/utf8_path.h"
#include "model/model.h"
#include "text/tokenizer/tokenizer.h"

namespace h2o::capi {

struct TextModel {
  // device: as in h2o_model_options. Throws as the constructor.
  static std::shared_ptr<TextModel> open(const std::string& path, const std::string& device,
                                         int32_t n_threads) {
    if (device == "auto" && auto_device().name == "cuda") {
      try {
        return std::make_shared<TextModel>(path, "cuda", n_threads);
      } catch (const std::exception&) {  // such as weights of an unsupported type
      }
    }
    return std::make_shared<TextModel>(path, device, n_threads);
  }

  // path: UTF-8. Throws FileError, FormatError, OutOfMemory, InvalidArgument.
  TextModel(const std::string& path, const std::string& device, int32_t n_threads)
      : model(path_of(path), make_backend(device, n_threads)),
        tokenizer(open_tokenizer(model)),
        chat_template(repaired_utf8(tokenizer.chat_template().value_or(""))),
        architecture(model.config.family->architecture),
        backend(model.backend->name()) {}

  Model model;
  const Tokenizer tokenizer;
  const std::string chat_template;  // Jinja; "" = none
  const std::string architecture;
  const std::string backend;  // its name

 private:
  static Tokenizer open_tokenizer(const Model& model) {
    try {
      return Tokenizer(model.file.first_file(), model.config.n_vocab);
    } catch (const FormatError& e) {
      throw FormatError(concat(model.file.path(), ": ", e.what()));
    }
  }
};

}  // namespace h2o::capi
