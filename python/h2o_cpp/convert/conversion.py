"""Converts a Hugging Face checkpoint to one GGUF file."""

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_VERSION,
    GGMLQuantizationType,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    PoolingType,
)
from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp.convert import (
    encoders,
    falcon_h1,
    gemma4,
    gpt,
    gpt_oss,
    granite4,
    latent,
    layernorm,
    lfm2,
    llama,
    llama4,
    llama_likes,
    mixtures,
    nemotron_h,
    qwen35,
    reranker,
)
from h2o_cpp.convert.checkpoint import SourceTensor, open_tensors, read_json, read_optional_json
from h2o_cpp.convert.config import Config, Value, dimension
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.quantized import dequantized, quantization_of
from h2o_cpp.convert.tensors import PlannedTensor, plan_tensors, predictor_of
from h2o_cpp.convert.vocabulary import read_vocabulary
from h2o_cpp.files.atomic import atomic_output, check_output

# config.json's architectures[0] -> family
FAMILIES: dict[str, Family] = {
    **gpt.FAMILIES,
    **llama.FAMILIES,
    **llama4.FAMILIES,
    **llama_likes.FAMILIES,
    **mixtures.FAMILIES,
    **latent.FAMILIES,
    **layernorm.FAMILIES,
    **gpt_oss.FAMILIES,
    **qwen35.FAMILIES,
    **lfm2.FAMILIES,
    **gemma4.FAMILIES,
    **granite4.FAMILIES,
    **encoders.FAMILIES,
}
# the same -> a function of config.json, where it decides
_VARIANTS: dict[str, Callable[[Config], Family]] = {
    **granite4.VARIANTS,
    **layernorm.VARIANTS,
    **falcon_h1.VARIANTS,
    **nemotron_h.VARIANTS,
}
_NAMES = (*FAMILIES, *_VARIANTS)

_STATE = "which have a state instead of a KV cache"

# part of an architecture's name -> what such models need beyond what can be converted
_UNSUPPORTED = {
    r"Mamba|Jamba|Zamba|Plamo2": (
        "a state-space model that is not Mamba-2, or without attention beside it"
    ),
    r"KimiLinear": f"layers of linear attention, {_STATE}",
    r"Rwkv|RWKV": f"layers of linear attention (RWKV), {_STATE}",
    r"Deepseek|GlmMoeDsa|Plm": (
        "multi-head latent attention (MLA), whose cache holds one compressed row for all heads"
    ),
    r"Gemma3n": "several residual streams (AltUp), and activations that are mostly zeros",
    r"MiMoV2": (
        "values of another size than keys, and numbers of heads that differ between layers"
    ),
    r"Step3p5": "gates of attention by head, and numbers of heads that differ between layers",
    r"Afmoe": "a tensor of gates of attention's outputs, and norms of the blocks' outputs",
    r"ConditionalGeneration|VLFor|VisionFor": "an encoder of pictures or sound, or of the prompt",
    r"Bert|RobertaFor|MaskedLM": "attention to later tokens (an encoder)",
}

# A checkpoint may also have an encoder of images, whose tensors have these names; those of the text
# model then have another prefix.
_ENCODER = re.compile(
    r"(model\.)?(visual|(vision|audio)_tower|embed_(vision|audio)|vision_(embedder|model)|multi_modal_projector)\."
)
_TEXT = re.compile(r"(model\.)?language_model\.")

# outtype -> type of the weight matrices, general.file_type
OUTTYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}


def convert(
    checkpoint: Path,
    output: Path,
    outtype: str = "f16",
    *,
    overwrite: bool = True,
    progress: bool = True,
) -> list[str]:
    """Convert the checkpoint in a directory to the GGUF file `output`.

    outtype: the type of the weight matrices: f32, f16, bf16 or q8_0. Norms, biases and learned
        positions stay f32.
    progress: show a bar if stderr is a terminal.

    Tensors are converted one at a time, so memory holds at most the largest; two, to compare a tied
    head with the embedding. `output` is complete or unchanged.

    Of a checkpoint with an encoder of images, only the text model is converted.

    Returns notes: what of the checkpoint the file lacks.

    Raises FileNotFoundError if the checkpoint, one of its files or the directory of `output` does
    not exist; FileExistsError if `output` exists, unless `overwrite`; ValueError for an unknown
    `outtype`, an `output` that is a file of the checkpoint, and a checkpoint that is damaged or
    that GGUF cannot represent.
    """
    if outtype not in OUTTYPES:
        raise ValueError(f"unknown outtype {outtype!r}; choose from {', '.join(OUTTYPES)}")
    weight_type, file_type = OUTTYPES[outtype]
    if checkpoint.is_file():
        raise ValueError(f"{checkpoint}: a file, expected the directory that it is in")
    if not checkpoint.is_dir():
        of_hub = re.match(r"(hf|https?):/|[\w.-]+/[\w.-]+$", str(checkpoint)) is not None
        hint = "; one of the Hub is downloaded before, by: hf download OWNER/REPO --local-dir DIR"
        raise FileNotFoundError(f"{checkpoint}: no such directory{hint * of_hub}")
    _check_output(output, checkpoint)
    check_output(output, overwrite=overwrite)
    if (checkpoint / "adapter_config.json").is_file() and not (checkpoint / "config.json").exists():
        raise ValueError(
            f"{checkpoint}: a LoRA adapter; merge it into its base model (merge_and_unload of peft)"
            " and convert the result"
        )
    config: Config = _plain(read_json(checkpoint / "config.json"))
    family = family_of(config)
    has_encoder = isinstance(config.get("vision_config"), dict)
    config = {**family.absent, **(_text_config(config) if has_encoder else config)}
    source = open_tensors(checkpoint)
    if family.head is None:
        family, source = encoders.with_dense_layers(family, checkpoint, source)
    metadata = family.metadata(config)
    quantization = quantization_of(checkpoint, config)
    if quantization is not None and not _keeps_mxfp4(family, quantization):
        source = dequantized(source, quantization)
    if has_encoder:
        source = _text_tensors(source)
    notes = []
    if not _has_head(family, config, source):
        config = {**config, family.tied_keys[0]: True}
        notes.append("the checkpoint has no head, so logits are those of the embedding")
    metadata |= family.of_weights(source, family.sizes(config)["layers"])
    if (predictor := predictor_of(family, config, source)) is not None:
        metadata |= predictor.metadata(metadata, family.sizes(config)["layers"])
    tensors = plan_tensors(family, config, source, weight_type)
    vocabulary = read_vocabulary(
        checkpoint,
        config,
        size=dimension(config, "vocab_size"),
        add_bos=family.add_bos,
        control_tokens=family.control_tokens,
        visible_tokens=family.visible_tokens,
        piece_merges=family.piece_merges,
    )

    scores = reranker.is_reranker(checkpoint, config)
    if scores:
        vocabulary = reranker.with_template(vocabulary)
        tensors.append(reranker.labels(family, config, source, vocabulary, weight_type))

    with atomic_output(output) as path, closing(_Writer(path, family.architecture)) as writer:
        writer.add_type("model")
        writer.add_name(_name(checkpoint, config))
        writer.add_file_type(file_type)
        if weight_type is GGMLQuantizationType.Q8_0:
            writer.add_quantization_version(GGML_QUANT_VERSION)
        for key, value in metadata.items():
            own = ("h2o.", "tokenizer.", "xielu.")
            full_key = key if key.startswith(own) else f"{family.architecture}.{key}"
            add_value(writer, full_key, value)
        if scores:
            reranker.write(writer, family.architecture)
        elif "pooling_type" not in metadata and (pooling := _pooling_type(checkpoint)) is not None:
            writer.add_uint32(f"{family.architecture}.pooling_type", pooling)
        vocabulary.write(writer)
        _write_tensors(writer, tensors, progress)
    if has_encoder:
        notes.append("only the model of text is converted, not the encoder of images")
    further = [kind for kind, _ in encoders.further_modules(checkpoint)]
    if further and not family.more_modules:
        notes.append(
            f"embeddings of the checkpoint also pass {', '.join(further)}, which the file lacks"
        )
    return [*notes, *vocabulary.notes]


class _Writer(GGUFWriter):
    """A writer that can write empty arrays, too."""

    def _pack_val(
        self,
        val: Any,
        vtype: GGUFValueType,
        add_vtype: bool,
        sub_type: GGUFValueType | None = None,
    ) -> bytes:
        if vtype is GGUFValueType.ARRAY and not val and sub_type is not None:
            return struct.pack("<IIQ", vtype, sub_type, 0)
        return super()._pack_val(val, vtype, add_vtype, sub_type)


_POOLINGS = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "lasttoken": PoolingType.LAST}
# Their names before sentence-transformers 6.
_OLD_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def _pooling_type(checkpoint: Path) -> PoolingType | None:
    """Which hidden state is the embedding, by the files of sentence-transformers.

    Raises ValueError for one that GGUF cannot express, such as the largest of each dimension.
    """
    path = checkpoint / "1_Pooling" / "config.json"
    config = read_optional_json(path)
    given = config.get("pooling_mode")
    modes = [given] if isinstance(given, str) else given
    if not isinstance(modes, list):
        chosen = [key for key, value in config.items() if value is True]
        old = [key for key in chosen if key.startswith("pooling_mode_")]
        modes = [_OLD_MODES.get(key, key.removeprefix("pooling_mode_")) for key in old]
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise ValueError(
            f"{path}: pooling by {', '.join(map(str, modes))}; a GGUF file has mean, cls or last"
        )
    return _POOLINGS[modes[0]]


def _check_output(output: Path, checkpoint: Path) -> None:
    """Raise ValueError if the output would replace an input; GGUF files are not inputs."""
    if not output.exists():
        return
    for file in checkpoint.iterdir():
        if file.suffix != ".gguf" and file.is_file() and file.samefile(output):
            raise ValueError(f"{output}: the output is {file}, a file of the checkpoint")


def _plain(config: Config) -> Config:
    """config.json with the usual names: an architecture with a head, and silu for swish.

    The base of a model, such as LlamaModel, has the tensors of the whole but for the head; without
    `architectures`, model_type says which model it is.
    """
    changed: dict[str, object] = {
        key: "silu" for key in ("hidden_act", "hidden_activation") if config.get(key) == "swish"
    }
    found = config.get("architectures")
    stem = None
    if not found:
        stem = str(config.get("model_type", "")).removesuffix("_text")
    elif isinstance(found, list) and str(found[0]) not in _NAMES:
        stem = str(found[0]).removesuffix("Model")
        stem = None if stem == found[0] else stem
    if stem:
        known = {_stem(name): name for name in reversed(_NAMES)}
        if name := known.get(stem.replace("_", "").lower()):
            changed["architectures"] = [name]
    return {**config, **changed}


def _stem(architecture: str) -> str:
    """qwen3moe of Qwen3MoeForCausalLM."""
    stem = re.sub(r"(For(CausalLM|ConditionalGeneration)|(LMHead)?Model)$", "", architecture)
    return stem.replace("_", "").lower()


def _has_head(family: Family, config: Config, tensors: Mapping[str, SourceTensor]) -> bool:
    """Whether the checkpoint has a head or needs none; the base of a model has none."""
    is_base = not any(name.startswith(family.base_prefix) for name in tensors)
    if family.head is None or family.is_tied(config):
        return True
    return any(name.endswith(f"{family.head.hf}.weight") for name in tensors) or not is_base


def family_of(config: Config) -> Family:
    """The family of a config.json. Raises ValueError if its models cannot be converted."""
    match config.get("architectures"):
        case [str(name), *_] if name in _NAMES:
            family = _VARIANTS[name](config) if name in _VARIANTS else FAMILIES[name]
            if (config.get("text_config") or {}).get("model_type") == "mistral4":
                family = FAMILIES["Mistral4ForCausalLM"]  # of Mistral3ForConditionalGeneration
            if config.get("use_bidirectional_attention") and family.architecture == "gemma3":
                family = llama.GEMMA_EMBEDDING
            if family.head is not None and config.get("is_causal") is False:
                raise ValueError("config.json: is_causal is False: tokens attend to later ones")
            return family
        case [str(name), *_]:
            for pattern, needs in _UNSUPPORTED.items():
                if re.search(pattern, name):
                    raise ValueError(f"config.json: architectures is {name!r}, which needs {needs}")
    raise ValueError(
        f"config.json: architectures is {config.get('architectures')!r};"
        f" {', '.join(_NAMES)} can be converted"
    )


def _keeps_mxfp4(family: Family, quantization: Mapping[str, object]) -> bool:
    return family.mxfp4 and quantization.get("quant_method") == "mxfp4"


def _text_config(config: Config) -> Config:
    """config.json of the text model alone; `text_config` may have only a part of the keys."""
    own = config.get("text_config")
    if not isinstance(own, dict):
        return config
    whole = {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    return {**config, **own, **whole}


def _text_tensors(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """The tensors of the text model, by the names that they have without an encoder."""
    return {
        _TEXT.sub("", name, count=1): tensor
        for name, tensor in tensors.items()
        if not _ENCODER.match(name)
    }


def add_value(writer: GGUFWriter, key: str, value: Value) -> None:
    """Add a value of a family's metadata to a file."""
    match value:
        case bool():  # before int, which it is too
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _name(checkpoint: Path, config: Config) -> str:
    """general.name: the last part of the Hugging Face id, or the name of the directory."""
    origin = config.get("_name_or_path")
    return (Path(origin).name if isinstance(origin, str) else "") or checkpoint.resolve().name


def _write_tensors(writer: GGUFWriter, tensors: Sequence[PlannedTensor], progress: bool) -> None:
    """Write the header, then the tensors one by one; sizes are known before values."""
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.spec.gguf,
            tensor.shape,
            np.dtype(np.float32),  # not uint8, which would make `shape` count bytes
            tensor.nbytes,
            raw_dtype=tensor.type,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None  # opened by the first of these
    [file] = writer.fout
    writer.write_padding(file, file.tell())
    with tqdm(
        total=sum(tensor.nbytes for tensor in tensors),
        desc="converting",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,  # None: unless stderr is a terminal
    ) as bar:
        for tensor in tensors:
            # Not write_tensor_data: numpy.ndarray.tofile turns Ctrl-C into a TypeError.
            file.write(np.ascontiguousarray(tensor.encode()).data)
            writer.write_padding(file, tensor.nbytes)
            bar.update(tensor.nbytes)
