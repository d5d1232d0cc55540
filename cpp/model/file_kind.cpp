#include "model/file_kind.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "model/family.h"

namespace h2o {
namespace {

const GgufTensor* find_tensor(const GgufShards& file, bool (*matches)(std::string_view)) {
  for (const GgufFile& part : file.files()) {
    for (const GgufTensor& tensor : part.tensors()) {
      if (matches(tensor.name)) return &tensor;
    }
  }
  return nullptr;
}

// blk.0.ffn_gate.1.weight
bool is_single_expert(std::string_view name) {
  for (const std::string_view part : {".ffn_gate.", ".ffn_up.", ".ffn_down."}) {
    const size_t at = name.find(part);
    if (at == name.npos || at + part.size() == name.size()) continue;
    const char next = name[at + part.size()];
    if (name.starts_with("blk.") && next >= '0' && next <= '9') return true;
  }
  return false;
}

// Are the tensors of an encoder beside the text model known to be no part of it?
bool may_see(std::string_view architecture) {
  const auto names = architectures();
  return std::ranges::find(names, architecture) != names.end() && find_family(architecture).may_see;
}

}  // namespace

bool is_of_encoder(std::string_view tensor) {
  return tensor.starts_with("v.") || tensor.starts_with("mm.") || tensor.starts_with("a.");
}

std::vector<std::string> unused_parts(const GgufShards& file) {
  const GgufTensor* const found = find_tensor(file, is_of_encoder);
  if (found == nullptr) return {};
  return {concat("the encoder of images or sound inside (", quoted(found->name),
                 " and others) is not used")};
}

void expect_text_model(const GgufShards& file) {
  const GgufFile& first = file.first_file();
  const auto refuse = [&](const auto&... what) {
    throw FormatError(concat("[model] ", file.path(), ": ", what...));
  };
  const std::string_view type = first.string_or("general.type", "model");
  const std::string_view architecture = first.string_or("general.architecture", "");
  if (type == "mmproj" || architecture == "clip") {
    refuse(
        "an encoder of images or sound (mmproj), not a model of text; take the model's own file "
        "beside it");
  }
  if (type == "adapter" || first.find("adapter.type") != nullptr) {
    refuse("a LoRA adapter, not a model; merge it into its base model (llama.cpp's ",
           "llama-export-lora) and take the result");
  }
  if (type == "imatrix") {
    refuse("an importance matrix, not a model; it is for h2o-cpp quantize --imatrix");
  }
  if (architecture == "gptoss" || architecture == "olmo3") {
    refuse("a file of Ollama's own engine, whose names differ from those of other programs (",
           quoted(architecture), "); take llama.cpp's file of the model, for example from the Hub");
  }
  const GgufTensor* const found = find_tensor(file, is_of_encoder);
  if (found != nullptr && !may_see(architecture)) {
    refuse(
        "a model with an encoder of images or sound inside (", quoted(found->name),
        "), as Ollama stores them; take a file of the text model only, as llama.cpp's converter ",
        "writes it beside an mmproj file");
  }
  if (const GgufTensor* expert = find_tensor(file, is_single_expert)) {
    refuse("the experts are stored one by one (", quoted(expert->name), "), as in old files of ",
           "Mixtral from before March 2024; take a newer file, or convert the checkpoint");
  }
}

void expect_weights(const GgufShards& file) {
  const auto has_tensors = [](const GgufFile& part) { return !part.tensors().empty(); };
  if (std::ranges::any_of(file.files(), has_tensors)) return;
  throw FormatError(concat("[model] ", file.path(), ": a vocabulary only, without weights; take ",
                           "the file of the whole model"));
}

}  // namespace h2o
