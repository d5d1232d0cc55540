"""What the converter must know of a model family; the files beside this one describe them."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config

Metadata = dict[str, bool | int | float | str | list[bool]]
"""Values by key without the architecture, or with `h2o.` for keys of our own."""

Sizes = Mapping[str, int]
"""The sizes of a model by the names that its modules use, such as embd and ff."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write: `gguf` is its name in the file, `hf` its name in the checkpoint.

    `shape` is the shape in the checkpoint, in PyTorch order (..., rows, columns). Of the rows only
    those from the first to before the second of `rows` are written. `transform` changes the values,
    not the shape, unless `written` is the one that results. With `stack` it is so many tensors of
    that shape, one after another, `hf` having {} for their numbers. With `mxfp4_rows` the
    checkpoint may have it in MXFP4, transposed, as `hf`_blocks and `hf`_scales, of which these rows
    of each matrix are written as they are.
    """

    gguf: str
    hf: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transform: Callable[[Values], Values] | None = None
    stack: int = 0
    written: tuple[int, ...] | None = None
    mxfp4_rows: slice | None = None

    @property
    def written_shape(self) -> tuple[int, ...]:
        """The shape in the file, in PyTorch order."""
        if self.written is not None:
            return self.written
        shape = list(self.shape)
        if self.rows is not None:
            shape[-2] = self.rows[1] - self.rows[0]
        return (self.stack, *shape) if self.stack else tuple(shape)

    def sources(self) -> list[str]:
        """The names in the checkpoint."""
        return [self.hf.format(i) for i in range(self.stack)] if self.stack else [self.hf]


class Module(NamedTuple):
    """A module with a weight and perhaps a bias; `shape` names the sizes of the weight.

    Where `hf` has {}, there is one for each expert.
    `reorder` re-orders the rows of both, given the size of a head; `add` is added to the weight.
    `rows` names the first row that is written, and the first that is not.
    """

    gguf: str
    hf: str
    shape: tuple[str, ...]
    bias: bool = False
    reorder: Callable[[Values, int], Values] | None = None
    add: float = 0
    rows: tuple[str, str] | None = None

    def in_layer(self, index: int, layers: str) -> "Module":
        """This module in a transformer layer; `layers` is the HF name of the list of layers."""
        return self._replace(gguf=f"blk.{index}.{self.gguf}", hf=f"{layers}.{index}.{self.hf}")

    def tensors(self, sizes: Sizes) -> Iterator[TensorSpec]:
        """The weight, then the bias."""
        shape = tuple(sizes[name] for name in self.shape)
        for part, part_shape in (("weight", shape), ("bias", shape[:1])):
            if part == "weight" or self.bias:
                yield TensorSpec(
                    f"{self.gguf}.{part}",
                    f"{self.hf}.{part}",
                    part_shape,
                    transform=self._transform(sizes),
                    rows=None if self.rows is None else (sizes[self.rows[0]], sizes[self.rows[1]]),
                    stack=sizes["experts"] if "{}" in self.hf else 0,
                )

    def _transform(self, sizes: Sizes) -> Callable[[Values], Values] | None:
        reorder, add = self.reorder, self.add
        if add:
            return lambda values: values + np.float32(add)
        return None if reorder is None else lambda values: reorder(values, sizes["head"])


@dataclass(frozen=True)
class Family:
    """A model family, as a GGUF architecture and the functions that map a checkpoint to it."""

    architecture: str
    """general.architecture, and the prefix of the family's metadata keys."""

    base_prefix: str
    """Starts the HF names of all tensors but the head, or is absent when only the base was saved;
    the names in `tensors` and `ignored` are without it."""

    metadata: Callable[[Config], Metadata]
    """config.json -> what the file says of the model; int is written as u32, float as f32. Raises
    ValueError for a model that the architecture cannot represent."""

    tensors: Callable[[Config], Iterator[TensorSpec]]
    """config.json -> the tensors to write, in file order."""

    ignored: re.Pattern[str]
    """Matches the names of tensors that a checkpoint may have and that need not be written."""

    computed: Callable[[Config], Mapping[str, Values]] = lambda config: {}
    """config.json -> tensors to write that no checkpoint has, by GGUF name."""

    add_bos: bool = False
    """tokenizer.ggml.add_bos_token, unless the tokenizer says otherwise."""

    mxfp4: bool = False
    """Checkpoints may have weights in MXFP4."""

    control_tokens: frozenset[str] = frozenset()
    """Tokens that are control tokens even if the checkpoint does not list them as special."""
