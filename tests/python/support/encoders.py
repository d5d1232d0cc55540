"""Random encoders of Hugging Face transformers, with tokenizers of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS = ["the", "old", "man", "went", "to", "a", "sea", "is", "naïve", "東", "京", "!", ","]
PARTS = ["##s", "##ing", "##a", "##e", "t", "h", "e", "o", "l", "d", "m", "##n", "##t", "##l"]
WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *PARTS, "naive", "Old"]

TEXTS = ["The old man went to the sea!", "A SEA", "is naïve, 東京?", "teas"]


def write_word_pieces(path: Path, tokens: Sequence[str] = WORD_PIECES, **normalizer: bool) -> Any:
    """Write BERT's tokenizer.json and return the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    ids = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = ("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[cls, sep]
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([token for token in tokens if token.startswith("[")])
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer


def save(model: Any, path: Path) -> None:
    """Write a checkpoint, without a tokenizer."""
    model.save_pretrained(path, safe_serialization=True)


def pooling(path: Path, mode: str) -> None:
    """Say how sentence-transformers pools the hidden states."""
    (path / "1_Pooling").mkdir()
    text = json.dumps({f"pooling_mode_{mode}": True})
    (path / "1_Pooling" / "config.json").write_text(text, encoding="utf-8")


def make(name: str, seed: int = 0, **options: Any) -> Any:
    """A random model of a class of transformers, in eval mode.

    Weights are larger than a new model's, so that attention and types matter.
    """
    import torch
    import transformers

    config = getattr(transformers, f"{name.partition('For')[0].removesuffix('Model')}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config(**options)).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
            elif "norm" in key.lower() and key.endswith("weight"):
                weight.normal_(1, 0.2)
            else:
                weight.normal_(0, 0.2)
    return model


def hidden_states(model: Any, tokens: Sequence[int]) -> NDArray[np.float64]:
    """The last hidden states of a text's tokens, in float64."""
    import torch

    with torch.no_grad():
        found = model.double()(torch.as_tensor([list(tokens)])).last_hidden_state[0]
    return np.asarray(found.numpy(), np.float64)
