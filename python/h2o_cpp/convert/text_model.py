"""The text model of a checkpoint that also has an encoder of images."""

import re
from collections.abc import Mapping

from h2o_cpp.convert.checkpoint import SourceTensor
from h2o_cpp.convert.config import Config

_ENCODER = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.")
_TEXT = re.compile(r"(model\.)?language_model\.")

NOTE = "only the model of text is converted, not the encoder of images"


def has_encoder(config: Config) -> bool:
    """Whether config.json describes an encoder."""
    return isinstance(config.get("vision_config"), dict)


def text_config(config: Config) -> Config:
    """config.json of the text model alone; `text_config` may have only a part of the keys."""
    own = config.get("text_config")
    if not isinstance(own, dict):
        return config
    whole = {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    return {**config, **own, **whole}


def text_tensors(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """The tensors of the text model, by the names that they have without an encoder."""
    return {
        _TEXT.sub("", name, count=1): tensor
        for name, tensor in tensors.items()
        if not _ENCODER.match(name)
    }
