"""Loading models, and sessions: sequences with bounded caches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import thread_count
from h2o_cpp.budget.policy import Policy
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.options import CacheOptions, MachineOptions, make_options


def open_model(
    source: str | os.PathLike[str] | ModelFile,
    *,
    device: str,
    threads: int | None,
    max_resident: int | str | None = None,
    exact: bool = False,
) -> _core.Model:
    """Load a GGUF file; on a terminal, a progress bar appears after a second.

    source: the file, or as for Generator; device, threads, max_resident, exact: as for Generator.

    Raises FileNotFoundError, ValueError, OSError and MemoryError.
    """
    machine = MachineOptions(device=device, threads=threads, max_resident=max_resident, exact=exact)
    file = ModelFile.find(source)
    from tqdm import tqdm  # type: ignore[import-untyped]  # a tenth of the time to import this

    with tqdm(
        desc="weights", unit="B", unit_scale=True, unit_divisor=1024, delay=1, leave=False,
        disable=None,
    ) as bar:  # fmt: skip

        def show(loaded: int, total: int) -> None:
            bar.total = total
            bar.update(loaded - bar.n)

        return _core.Model(
            file.shards,
            device=device,
            threads=thread_count(threads),
            progress=show,
            max_resident=machine.resident_bytes,
            exact=bool(exact),
        )


def open_session(
    model: _core.Model,
    policy: Policy | Sequence[Policy],
    *,
    n_sequences: int = 1,
    **options: Any,
) -> _core.Session:
    """Empty sequences of `model`, each with a cache bounded by `policy`.

    policy: one for all layers, or one per layer. options: other CacheOptions; n_ctx is required.

    Raises ValueError, MemoryError and OSError.
    """
    core = make_options(CacheOptions, {"policy": policy, **options}).core()
    core.n_sequences = n_sequences
    return _core.Session(model, core)


def chunks(
    session: _core.Session, tokens: NDArray[np.int32], sequence: int = 0
) -> Iterator[NDArray[np.int32]]:
    """Split tokens into chunks as long as the sequence's next step allows.

    Each chunk must be read before the next is requested. Raises ValueError if the sequence has no
    room for all tokens.
    """
    room = session.room(sequence)
    if len(tokens) > room:
        raise ValueError(
            f"{len(tokens)} more tokens, expected at most {room}, the room left in the sequence"
        )
    while len(tokens):
        n = session.chunk(sequence)
        yield tokens[:n]
        tokens = tokens[n:]


def read_tokens(
    session: _core.Session,
    tokens: NDArray[np.int32],
    progress: Callable[[int], object] = lambda n: None,
) -> NDArray[np.float32]:
    """Read tokens into sequence 0, in chunks. Returns the logits after them, [1, n_vocab].

    progress: called with the number of tokens of each chunk.
    """
    logits = np.empty((0, 0), np.float32)  # after no tokens
    for chunk in chunks(session, tokens):
        logits = session.step([(0, chunk)])
        progress(len(chunk))
    return logits
