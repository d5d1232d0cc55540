"""Windows of a text, each read into an empty cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.arguments import check_int


def windows(
    tokens: Sequence[int],
    n_ctx: int,
    *,
    beginning: Sequence[int] = (),
    stride: int | None = None,
) -> Iterator[NDArray[np.int32]]:
    """Windows [n_ctx] of a text, each with `beginning`; stride: as for perplexity().

    Raises ValueError for a text shorter than a window.
    """
    stride = n_ctx - 1 if stride is None else check_int("stride", stride, 1, n_ctx - 1)
    n_text = n_ctx - len(beginning)
    if not 0 < n_text <= len(tokens):
        raise ValueError(
            f"the text has {len(tokens)} tokens, expected at least {n_text} for n_ctx={n_ctx}"
        )
    for begin in range(0, len(tokens) - n_text + 1, stride):
        yield np.asarray([*beginning, *tokens[begin : begin + n_text]], np.int32)
