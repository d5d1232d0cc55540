#include "model/family.h"

#include <string>

#include "core/error.h"

namespace h2o {
namespace {

// clang-format off
constexpr Family kFamilies[] = {
    //                                                                                    qk_norm parallel
    // OPT (learned positions)
    {"opt",     NormKind::layer, RopeLayout::none,   Activation::relu,   Biases::all,      false, false},
    // Llama 1 to 3.2, Mistral, TinyLlama, SmolLM (converters permute Q and K for adjacent pairs)
    {"llama",   NormKind::rms,   RopeLayout::pairs,  Activation::swiglu, Biases::optional, false, false},
    // GPT-NeoX, Pythia (partial rotary; Q, K, V in one tensor)
    {"gptneox", NormKind::layer, RopeLayout::halves, Activation::gelu,   Biases::all,      false, true},
    // Qwen2, Qwen2.5
    {"qwen2",   NormKind::rms,   RopeLayout::halves, Activation::swiglu, Biases::qkv,      false, false},
    // Qwen3 (head size independent of width)
    {"qwen3",   NormKind::rms,   RopeLayout::halves, Activation::swiglu, Biases::optional, true,  false},
};
// clang-format on

}  // namespace

const Family& find_family(std::string_view architecture) {
  std::string names;
  for (const Family& family : kFamilies) {
    if (family.architecture == architecture) return family;
    names += text(names.empty() ? "" : ", ", family.architecture);
  }
  throw FormatError(
      text("architecture ", quoted(architecture), " is not supported; supported: ", names));
}

}  // namespace h2o
