"""Qwen3-Reranker: a language model whose answer, yes or no, says whether a document is relevant.

Files have the two tokens' rows of the head as `cls.output`, and the prompt as a template, as
llama.cpp's converter writes them.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFWriter, PoolingType

from h2o_cpp.convert.checkpoint import SourceTensor
from h2o_cpp.convert.config import Config
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.modules import TensorSpec
from h2o_cpp.convert.tensors import PlannedTensor
from h2o_cpp.convert.vocabulary import Vocabulary

_NAME = "qwen3-reranker"
_LABELS = ("yes", "no")
_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer"
    " the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def is_reranker(checkpoint: Path, config: Config) -> bool:
    """Whether the checkpoint's name or description says so: its config.json is that of Qwen3."""
    readme = checkpoint / "README.md"
    about = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    names = (checkpoint.resolve().name, str(config.get("_name_or_path", "")))
    return any(_NAME in name.lower() for name in names) or f"# {_NAME}" in about.lower()


def with_template(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary with the template of a query and a document."""
    return replace(vocabulary, chat_templates={**vocabulary.chat_templates, "rerank": _TEMPLATE})


def labels(
    family: Family,
    config: Config,
    tensors: Mapping[str, SourceTensor],
    vocabulary: Vocabulary,
    weight_type: GGMLQuantizationType,
) -> PlannedTensor:
    """The rows of the head for the labels. Raises ValueError without these tokens or a head."""
    missing = [label for label in _LABELS if label not in vocabulary.tokens]
    if missing:
        raise ValueError(f"a reranker needs a token {missing[0]!r}, which the vocabulary lacks")
    rows = [vocabulary.tokens.index(label) for label in _LABELS]
    head = family.embeddings[0] if family.is_tied(config) else family.head
    assert head is not None  # of a decoder
    name = f"{head.hf}.weight"
    source = tensors.get(name, tensors.get(f"{family.base_prefix}{name}"))
    if source is None or source.read is None:
        raise ValueError(f"tensor {name} is missing from the checkpoint")
    spec = TensorSpec(
        "cls.output.weight",
        name,
        source.shape,
        transform=lambda values: values[rows],
        written=(len(rows), source.shape[1]),
    )
    return PlannedTensor(spec, [source.read], weight_type)


def write(writer: GGUFWriter, architecture: str) -> None:
    """Add the keys of a model that scores pairs of texts."""
    writer.add_uint32(f"{architecture}.pooling_type", PoolingType.RANK)
    writer.add_array(f"{architecture}.classifier.output_labels", _LABELS)
