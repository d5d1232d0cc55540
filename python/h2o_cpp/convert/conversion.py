"""Converts a Hugging Face checkpoint to one GGUF file."""

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType
from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp.convert import gpt, gpt_oss, layernorm, lfm2, llama, mixtures, qwen35
from h2o_cpp.convert.checkpoint import SourceTensor, open_tensors, read_json
from h2o_cpp.convert.config import Config, Value, dimension
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.tensors import PlannedTensor, plan_tensors
from h2o_cpp.convert.vocabulary import read_vocabulary
from h2o_cpp.model.atomic import atomic_output, check_output

# config.json's architectures[0] -> family
FAMILIES: dict[str, Family] = {
    **gpt.FAMILIES,
    **llama.FAMILIES,
    **mixtures.FAMILIES,
    **layernorm.FAMILIES,
    **gpt_oss.FAMILIES,
    **qwen35.FAMILIES,
    **lfm2.FAMILIES,
}

_STATE = "which have a state instead of a KV cache"

# part of an architecture's name -> what such models need beyond what can be converted
_UNSUPPORTED = {
    r"Mamba|Jamba|NemotronH|Bamba|FalconH1|Zamba|Plamo2": (
        f"layers of a state-space model (Mamba), {_STATE}"
    ),
    r"KimiLinear": f"layers of linear attention, {_STATE}",
    r"Rwkv|RWKV": f"layers of linear attention (RWKV), {_STATE}",
    r"DeepseekV[23]|MiniCPM3|KimiK2|GlmMoeDsa|Plm": (
        "multi-head latent attention (MLA), whose cache holds one compressed row for all heads"
    ),
    r"Llama4": "attention in chunks and temperatures of queries by position",
    r"HunYuan": "norms of q and k after their rotation",
    r"Apertus": "an activation with parameters of each layer (xIELU)",
    r"PhimoeFor|PhiMoE": "a router that drops experts far below the best (SparseMixer)",
    r"ConditionalGeneration|VLFor|VisionFor": "an encoder of pictures or sound, or of the prompt",
    r"Bert|RobertaFor|MaskedLM": "attention to later tokens (an encoder)",
}

# A checkpoint may also have an encoder of images, whose tensors have these names; those of the text
# model then have another prefix.
_ENCODER = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.")
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
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"{checkpoint}: no such directory")
    _check_output(output, checkpoint)
    check_output(output, overwrite=overwrite)
    config: Config = read_json(checkpoint / "config.json")
    family = _family(config)
    has_encoder = isinstance(config.get("vision_config"), dict)
    config = {**family.absent, **(_text_config(config) if has_encoder else config)}
    metadata = family.metadata(config)
    source = open_tensors(checkpoint)
    if has_encoder:
        source = _text_tensors(source)
    tensors = plan_tensors(family, config, source, weight_type)
    vocabulary = read_vocabulary(
        checkpoint,
        config,
        size=dimension(config, "vocab_size"),
        add_bos=family.add_bos,
        control_tokens=family.control_tokens,
    )

    with atomic_output(output) as path, closing(GGUFWriter(path, family.architecture)) as writer:
        writer.add_type("model")
        writer.add_name(_name(checkpoint, config))
        writer.add_file_type(file_type)
        if weight_type is GGMLQuantizationType.Q8_0:
            writer.add_quantization_version(GGML_QUANT_VERSION)
        for key, value in metadata.items():
            full_key = key if key.startswith("h2o.") else f"{family.architecture}.{key}"
            add_value(writer, full_key, value)
        vocabulary.write(writer)
        _write_tensors(writer, tensors, progress)
    note = "only the model of text is converted, not the encoder of images"
    return [*([note] if has_encoder else []), *vocabulary.notes]


def _check_output(output: Path, checkpoint: Path) -> None:
    """Raise ValueError if the output would replace an input; GGUF files are not inputs."""
    if not output.exists():
        return
    for file in checkpoint.iterdir():
        if file.suffix != ".gguf" and file.is_file() and file.samefile(output):
            raise ValueError(f"{output}: the output is {file}, a file of the checkpoint")


def _family(config: Config) -> Family:
    match config.get("architectures"):
        case [str(name), *_] if name in FAMILIES:
            family = FAMILIES[name]
            _check_quantization(family, config.get("quantization_config"))
            if config.get("is_causal") is False:
                raise ValueError("config.json: is_causal is False: tokens attend to later ones")
            return family
        case [str(name), *_]:
            for pattern, needs in _UNSUPPORTED.items():
                if re.search(pattern, name):
                    raise ValueError(f"config.json: architectures is {name!r}, which needs {needs}")
    raise ValueError(
        f"config.json: architectures is {config.get('architectures')!r};"
        f" {', '.join(FAMILIES)} can be converted"
    )


def _check_quantization(family: Family, quantization: object) -> None:
    match quantization:
        case None:
            return
        case {"quant_method": "mxfp4"} if family.mxfp4:
            return
    raise ValueError("config.json: quantization_config: the weights are quantized")


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
