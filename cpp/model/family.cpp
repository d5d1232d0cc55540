#include "model/family.h"

#include <string>

#include "core/error.h"

namespace h2o {
namespace {

constexpr Family kFamilies[] = {
    // OPT (learned positions)
    {.architecture = "opt",
     .norm = NormKind::layer,
     .rope = RopeLayout::none,
     .learned_positions = true,
     .activation = Activation::relu,
     .biases = Biases::all},
    // Llama 1 to 3.2, Mistral, Mixtral, TinyLlama, SmolLM (converters permute Q and K for pairs)
    {.architecture = "llama", .rope = RopeLayout::pairs, .experts = true},
    // Mistral Small 3 and Ministral 3
    {.architecture = "mistral3", .rope = RopeLayout::pairs, .may_see = true},
    // Llama 4, text (three of four layers attend in blocks; a shared expert)
    {.architecture = "llama4",
     .rope = RopeLayout::pairs,
     .window_period = 4,
     .window_size = 8192,
     .block_windows = true,
     .window_rotated = true,
     .experts = true,
     .experts_normalized = false,
     .experts_sigmoid = true,
     .shares_expert = true,
     .scales_inputs = true},
    // GPT-NeoX, Pythia (partial rotary; Q, K, V in one tensor)
    {.architecture = "gptneox",
     .norm = NormKind::layer,
     .activation = Activation::gelu,
     .biases = Biases::all,
     .parallel_residual = true},
    // Qwen 1 (Q, K, V in one tensor)
    {.architecture = "qwen", .biases = Biases::qkv, .ff_is_both = true},
    // Qwen2, Qwen2.5; and the text of Qwen2-VL and Qwen2.5-VL
    {.architecture = "qwen2", .biases = Biases::qkv},
    {.architecture = "qwen2vl", .may_see = true, .biases = Biases::qkv},
    {.architecture = "qwen25vl", .may_see = true, .biases = Biases::qkv},  // Ollama's name
    // Qwen1.5-MoE and Qwen2-57B-A14B (an expert that all rows share)
    {.architecture = "qwen2moe",
     .biases = Biases::qkv,
     .experts = true,
     .experts_normalized = false},
    // Qwen3 (head size independent of width), and the text of Qwen3-VL
    {.architecture = "qwen3", .qk_norm = QkNorm::heads},
    {.architecture = "qwen3vl", .may_see = true, .qk_norm = QkNorm::heads},
    // Qwen3-30B-A3B and other Qwen3 mixtures
    {.architecture = "qwen3moe", .qk_norm = QkNorm::heads, .experts = true},
    {.architecture = "qwen3vlmoe", .qk_norm = QkNorm::heads, .experts = true},
    // Qwen3-Next (three of four layers are Gated DeltaNet; attention's outputs are gated)
    {.architecture = "qwen3next",
     .qk_norm = QkNorm::heads,
     .attn_gate = true,
     .delta_net = true,
     .delta_adjacent = true,
     .ffn_norm = "post_attention_norm",
     .experts = true},
    // Qwen3.5 (three of four layers are Gated DeltaNet; attention's outputs are gated)
    {.architecture = "qwen35",
     .qk_norm = QkNorm::heads,
     .attn_gate = true,
     .delta_net = true,
     .ffn_norm = "post_attention_norm",
     .predicts = true},
    {.architecture = "qwen35moe",
     .qk_norm = QkNorm::heads,
     .attn_gate = true,
     .delta_net = true,
     .ffn_norm = "post_attention_norm",
     .predicts = true,
     .experts = true},
    // LFM2 (most layers are gated short convolutions)
    {.architecture = "lfm2",
     .qk_norm = QkNorm::heads,
     .short_conv = true,
     .output_norm = "token_embd_norm"},
    {.architecture = "lfm2moe",
     .qk_norm = QkNorm::heads,
     .short_conv = true,
     .output_norm = "token_embd_norm",
     .experts = true,
     .experts_sigmoid = true},
    // OLMo 1 (norms without weights; converters permute Q and K for pairs)
    {.architecture = "olmo",
     .norm = NormKind::layer,
     .rope = RopeLayout::pairs,
     .norm_bias = false,
     .norm_weights = false,
     .clamps = true},
    // OLMo 2 and 3 (norms after the blocks; three of four layers of OLMo 3 have a window)
    {.architecture = "olmo2",
     .qk_norm = QkNorm::whole,
     .window_period = 4,
     .window_unscaled = true,
     .pre_norms = false,
     .post_norms = true},
    // OLMoE
    {.architecture = "olmoe",
     .qk_norm = QkNorm::whole,
     .experts = true,
     .experts_normalized = false},
    // DeepSeek-MoE, the first (converters permute Q and K for pairs)
    {.architecture = "deepseek",
     .rope = RopeLayout::pairs,
     .experts = true,
     .experts_normalized = false},
    // DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash; Mistral Small 4 (multi-head latent attention)
    {.architecture = "deepseek2",
     .rope = RopeLayout::pairs,
     .latent = true,
     .predicts = true,
     .experts = true,
     .experts_normalized = false},
    {.architecture = "mistral4",
     .rope = RopeLayout::pairs,
     .may_see = true,
     .latent = true,
     .experts = true,
     .experts_normalized = false},
    // MiniCPM3 (the same, and multipliers)
    {.architecture = "minicpm3",
     .has_multipliers = true,
     .embedding_scale = 12,
     .depth_scale = 1.4f,
     .base_width = 256,
     .logit_scale = LogitScale::divides,
     .latent = true},
    // Ling and Ring 1; and 2 (a selection bias; groups of experts; Q, K, V in one tensor)
    {.architecture = "bailingmoe",
     .rope = RopeLayout::pairs,
     .experts = true,
     .experts_normalized = false},
    {.architecture = "bailingmoe2",
     .qk_norm = QkNorm::heads,
     .predicts = true,
     .experts = true,
     .experts_normalized = false,
     .experts_sigmoid = true},
    // dots.llm1
    {.architecture = "dots1",
     .qk_norm = QkNorm::heads,
     .experts = true,
     .experts_normalized = false,
     .experts_sigmoid = true},
    // MiniMax M2 (partial rotary)
    {.architecture = "minimax-m2",
     .qk_norm = QkNorm::whole,
     .experts = true,
     .experts_sigmoid = true},
    // Phi-3, Phi-4 (Q, K, V in one tensor, gate and up in another)
    {.architecture = "phi3"},
    // Phi-3.5-MoE (SparseMixer; layer norms, and biases of Q, K, V and the outputs)
    {.architecture = "phimoe",
     .norm = NormKind::layer,
     .experts = true,
     .experts_normalized = false,
     .mixer_spread = 0.02f},
    // Phi-1, Phi-1.5 and Phi-2 (partial rotary; the output layer has a bias)
    {.architecture = "phi2",
     .norm = NormKind::layer,
     .activation = Activation::gelu,
     .biases = Biases::all,
     .parallel_residual = true,
     .shared_norm = true},
    // Nemotron 3 and 4, Minitron (partial rotary)
    {.architecture = "nemotron", .norm = NormKind::layer, .activation = Activation::relu_squared},
    // Arcee AFM (converters permute Q and K for pairs)
    {.architecture = "arcee", .rope = RopeLayout::pairs, .activation = Activation::relu_squared},
    // Apertus (xIELU)
    {.architecture = "apertus", .activation = Activation::xielu, .qk_norm = QkNorm::heads},
    // Hunyuan, dense and with experts (norms of Q and K after their rotation)
    {.architecture = "hunyuan-dense", .qk_norm = QkNorm::rotated_heads},
    {.architecture = "hunyuan-moe", .qk_norm = QkNorm::rotated_heads, .experts = true},
    // InternLM 2 (converters permute Q and K for pairs)
    {.architecture = "internlm2", .rope = RopeLayout::pairs},
    // Baichuan 1 and 2 (7B: rotary positions, permuted for pairs; 13B: ALiBi)
    {.architecture = "baichuan",
     .rope = RopeLayout::pairs,
     .alibi_layers = 40,
     .alibi_max_bias = 8},
    // EXAONE 3
    {.architecture = "exaone"},
    // MiniCPM 1, 2 and 4 (multipliers; converters permute Q and K for pairs)
    {.architecture = "minicpm",
     .rope = RopeLayout::pairs,
     .has_multipliers = true,
     .logit_scale = LogitScale::divides},
    // Granite 3 (multipliers; converters permute Q and K for pairs)
    {.architecture = "granite",
     .rope = RopeLayout::pairs,
     .has_multipliers = true,
     .optional_rope = true,
     .logit_scale = LogitScale::divides},
    {.architecture = "granitemoe",
     .rope = RopeLayout::pairs,
     .has_multipliers = true,
     .optional_rope = true,
     .logit_scale = LogitScale::divides,
     .experts = true},
    // Granite 4 h, dense and with experts, and Bamba (most layers are Mamba-2; only Bamba has
    // positions)
    {.architecture = "granitehybrid",
     .rope = RopeLayout::pairs,
     .has_multipliers = true,
     .optional_rope = true,
     .logit_scale = LogitScale::divides,
     .state_space = true,
     .experts = true},
    // Falcon-H1 (attention and Mamba-2 in each layer; converters multiply weights by its factors)
    {.architecture = "falcon-h1", .state_space = true, .state_beside_attention = true},
    // Nemotron-H and Nemotron 3 Nano (a layer is Mamba-2, attention without positions, or an MLP)
    {.architecture = "nemotron_h",
     .rope = RopeLayout::none,
     .activation = Activation::relu_squared,
     .state_space = true,
     .single_blocks = true},
    {.architecture = "nemotron_h_moe",
     .rope = RopeLayout::none,
     .activation = Activation::relu_squared,
     .state_space = true,
     .single_blocks = true,
     .experts = true,
     .experts_normalized = false,
     .experts_sigmoid = true},
    // GLM-4 9B, and GLM-4 of April 2025 (partial rotary, in pairs; gate and up in one tensor).
    // Converters
    // permute Q and K of vision models for halves.
    {.architecture = "chatglm", .rope = RopeLayout::pairs},
    {.architecture = "glm4", .rope = RopeLayout::pairs, .mrope_halves = true, .post_norms = true},
    // GLM-4.5, 4.6 and 4.7, Solar Open (partial rotary)
    {.architecture = "glm4moe",
     .qk_norm = QkNorm::heads_if_present,
     .ffn_norm = "post_attention_norm",
     .predicts = true,
     .experts = true,
     .experts_normalized = false,
     .experts_sigmoid = true},
    // ERNIE 4.5, dense and with experts
    {.architecture = "ernie4_5", .rope = RopeLayout::pairs},
    {.architecture = "ernie4_5-moe", .rope = RopeLayout::pairs, .experts = true},
    // Seed-OSS
    {.architecture = "seed_oss", .biases = Biases::qkv, .ffn_norm = "post_attention_norm"},
    // EXAONE 4 (norms after the blocks; every fourth layer of 32B has neither window nor positions)
    {.architecture = "exaone4",
     .qk_norm = QkNorm::heads,
     .window_period = 4,
     .window_rotated = true,
     .pre_norms = false,
     .post_norms = true},
    // K-EXAONE (every fourth layer has neither window nor positions)
    {.architecture = "exaone-moe",
     .qk_norm = QkNorm::heads,
     .window_period = 4,
     .window_rotated = true,
     .predicts = true,
     .experts = true,
     .experts_normalized = false,
     .experts_sigmoid = true},
    // SmolLM3 (every fourth layer without positions; converters permute Q and K for pairs)
    {.architecture = "smollm3", .rope = RopeLayout::pairs, .unrotated_period = 4},
    // StarCoder2
    {.architecture = "starcoder2",
     .norm = NormKind::layer,
     .activation = Activation::gelu,
     .biases = Biases::all},
    // StableLM (partial rotary)
    {.architecture = "stablelm",
     .norm = NormKind::layer,
     .parallel_without_norm = true,
     .shared_norm = true},
    // Command-R
    {.architecture = "command-r",
     .norm = NormKind::layer,
     .rope = RopeLayout::pairs,
     .parallel_residual = true,
     .norm_bias = false,
     .shared_norm = true,
     .logit_scale = LogitScale::multiplies},
    // Command R7B and Command A (every fourth layer has neither window nor positions)
    {.architecture = "cohere2",
     .norm = NormKind::layer,
     .rope = RopeLayout::pairs,
     .parallel_residual = true,
     .window_period = 4,
     .window_rotated = true,
     .norm_bias = false,
     .shared_norm = true,
     .logit_scale = LogitScale::multiplies},
    // GPT-2 (learned positions; Q, K, V in one tensor)
    {.architecture = "gpt2",
     .norm = NormKind::layer,
     .rope = RopeLayout::none,
     .learned_positions = true,
     .activation = Activation::gelu,
     .biases = Biases::all},
    // StarCoder (the same; one KV head)
    {.architecture = "starcoder",
     .norm = NormKind::layer,
     .rope = RopeLayout::none,
     .learned_positions = true,
     .activation = Activation::gelu,
     .biases = Biases::all},
    // GPT-J (partial rotary, in pairs; the output layer has a bias)
    {.architecture = "gptj",
     .norm = NormKind::layer,
     .rope = RopeLayout::pairs,
     .activation = Activation::gelu,
     .parallel_residual = true,
     .shared_norm = true},
    // BLOOM (ALiBi; Q, K, V in one tensor; normalized embeddings)
    {.architecture = "bloom",
     .norm = NormKind::layer,
     .rope = RopeLayout::none,
     .activation = Activation::gelu,
     .biases = Biases::all,
     .embedding_norm = true,
     .alibi_max_bias = 8},
    // MPT (ALiBi; Q, K, V in one tensor)
    {.architecture = "mpt",
     .norm = NormKind::layer,
     .rope = RopeLayout::none,
     .activation = Activation::gelu,
     .norm_bias = false,
     .clamps = true,
     .alibi_max_bias = 8},
    // Falcon (Q, K, V in one tensor; 40B has two parallel norms)
    {.architecture = "falcon",
     .norm = NormKind::layer,
     .activation = Activation::gelu,
     .parallel_residual = true,
     .shared_norm = true},
    // gpt-oss (attention sinks, every other layer with a window, biases everywhere)
    {.architecture = "gpt-oss",
     .gate = Gate::swiglu_clamped,
     .biases = Biases::all,
     .window_period = 2,
     .attn_sinks = true,
     .yarn_whole = false,
     .ffn_norm = "post_attention_norm",
     .experts = true},
    // Gemma
    {.architecture = "gemma", .gate = Gate::geglu, .embedding_by_width = true},
    {.architecture = "gemma2",
     .gate = Gate::geglu,
     .window_period = 2,
     .window_size = 4096,
     .post_norms = true,
     .embedding_by_width = true,
     .scale_by_width = 46,  // 27B
     .softcaps = true,
     .attn_softcap = 50,
     .logit_softcap = 30},
    {.architecture = "gemma3",
     .rope_base = 1000000,
     .norm_eps = 1e-6f,
     .may_see = true,
     .gate = Gate::geglu,
     .qk_norm = QkNorm::heads,
     .window_period = 6,
     .window_unscaled = true,
     .window_base = 10000,
     .post_norms = true,
     .embedding_by_width = true,
     .scale_by_width = 62,  // 27B
     .softcaps = true},
    // Gemma 4 (most layers have a window, and heads of another size; the last layers of small
    // models
    // read keys and values of others, and layers have embeddings of their own; experts beside an
    // MLP)
    {.architecture = "gemma4",
     .rope_base = 1000000,
     .gate = Gate::geglu,
     .qk_norm = QkNorm::heads,
     .window_period = 6,
     .window_unscaled = true,
     .window_base = 10000,
     .post_norms = true,
     .embedding_by_width = true,
     .softcaps = true,
     .mixed_sizes = true,
     .layer_inputs = true,
     .v_norm = true,
     .k_is_v = true,
     .output_scales = true,
     .experts = true,
     .experts_beside_mlp = true},
    // BERT, MiniLM, BGE, E5; XLM-RoBERTa, bge-m3, bge-reranker (encoders; norms of sums)
    {.architecture = "bert",
     .norm = NormKind::layer,
     .rope = RopeLayout::none,
     .learned_positions = true,
     .activation = Activation::gelu,
     .biases = Biases::all,
     .pre_norms = false,
     .embedding_norm = true,
     .encoder = true,
     .sum_norms = true,
     .output_norm = ""},
    // nomic-embed-text (the same with rotary positions and SwiGLU)
    {.architecture = "nomic-bert",
     .norm = NormKind::layer,
     .pre_norms = false,
     .embedding_norm = true,
     .encoder = true,
     .sum_norms = true,
     .output_norm = ""},
    // jina-embeddings-v2 (the same with ALiBi and GeGLU)
    {.architecture = "jina-bert-v2",
     .norm = NormKind::layer,
     .rope = RopeLayout::none,
     .gate = Gate::geglu,
     .pre_norms = false,
     .embedding_norm = true,
     .alibi_max_bias = 8,
     .encoder = true,
     .sum_norms = true,
     .output_norm = ""},
    // ModernBERT (two of three layers have a window; the first has no norm before attention)
    {.architecture = "modern-bert",
     .norm = NormKind::layer,
     .rope_base = 160000,
     .gate = Gate::geglu,
     .window_period = 3,
     .window_first_free = true,
     .window_unscaled = true,
     .window_base = 10000,
     .norm_bias = false,
     .embedding_norm = true,
     .encoder = true},
    // EmbeddingGemma (Gemma 3 as an encoder)
    {.architecture = "gemma-embedding",
     .rope_base = 1000000,
     .norm_eps = 1e-6f,
     .gate = Gate::geglu,
     .qk_norm = QkNorm::heads,
     .window_period = 6,
     .window_unscaled = true,
     .window_base = 10000,
     .post_norms = true,
     .embedding_by_width = true,
     .encoder = true},
};

// Features that unsupported architectures need.
struct Missing {
  std::string_view what;
  std::string_view architectures;  // separated by spaces
};
constexpr Missing kMissing[] = {
    {"a state-space model that is not Mamba-2, or without attention beside it",
     " mamba mamba2 falcon_mamba jamba plamo2 "},
    {"layers of linear attention of another kind than Qwen3.5's", " kimi-linear "},
    {"layers of linear attention (RWKV), which have a state instead of a KV cache",
     " rwkv6 rwkv6qwen2 rwkv7 arwkv7 "},
    {"multi-head latent attention (MLA), whose cache holds one compressed row for all heads",
     " deepseek2-ocr plm glm-dsa "},
    {"several residual streams (AltUp), and activations that are mostly zeros", " gemma3n "},
    {"values of another size than keys, and numbers of heads that differ between layers",
     " mimo2 "},
    {"gates of attention by head, and numbers of heads that differ between layers", " step35 "},
    {"a tensor of gates of attention's outputs, and norms of the blocks' outputs", " afmoe "},
    {"attention to later tokens (an encoder)",
     " nomic-bert-moe neo-bert jina-bert-v3 eurobert llama-embed t5encoder "},
    {"an encoder beside the decoder", " t5 "},
    {"denoising of whole texts (diffusion)", " dream llada llada-moe rnd1 "},
};

}  // namespace

const Family& find_family(std::string_view architecture) {
  for (const Family& family : kFamilies)
    if (family.architecture == architecture) return family;
  std::string names;
  for (std::string_view known : architectures()) names += concat(names.empty() ? "" : ", ", known);
  for (const auto& [what, lacking] : kMissing) {
    if (lacking.find(concat(" ", architecture, " ")) == lacking.npos) continue;
    throw FormatError(concat("architecture ", quoted(architecture), " is not supported: it needs ",
                             what, "; supported: ", names));
  }
  throw FormatError(
      concat("architecture ", quoted(architecture), " is not supported; supported: ", names));
}

std::vector<std::string_view> architectures() {
  std::vector<std::string_view> names;
  for (const Family& family : kFamilies) names.push_back(family.architecture);
  return names;
}

}  // namespace h2o
