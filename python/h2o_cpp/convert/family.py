"""What the converter must know of a model family; one file beside this one describes each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from h2o_cpp.convert.checkpoint import Config


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write: `gguf` is its name in the file, `hf` its name in the checkpoint.

    `shape` is the shape in the checkpoint, in PyTorch order (rows, columns); the first
    `skip_rows` rows are not written.
    """

    gguf: str
    hf: str
    shape: tuple[int, ...]
    skip_rows: int = 0


@dataclass(frozen=True)
class Family:
    """A model family, as a GGUF architecture and the functions that map a checkpoint to it."""

    architecture: str
    """general.architecture, and the prefix of the family's metadata keys."""

    base_prefix: str
    """Starts the HF names of all tensors but the head, or is absent when only the base was saved;
    the names in `tensors` and `ignored` are without it."""

    metadata: Callable[[Config], Mapping[str, int | float]]
    """config.json -> values by key without the architecture; int is written as u32, float as f32.
    Raises ValueError for a model that the architecture cannot represent."""

    tensors: Callable[[Config], Iterator[TensorSpec]]
    """config.json -> the tensors to write, in file order."""

    ignored: frozenset[str]
    """Tensors that a checkpoint may have and that need not be written."""

    add_bos: bool
    """tokenizer.ggml.add_bos_token, unless the tokenizer's configuration says otherwise."""

    control_tokens: frozenset[str]
    """Tokens that are control tokens even if the checkpoint does not list them as special."""
