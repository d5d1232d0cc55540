"""Loading models, and sessions: sequences with bounded caches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.model.arguments import (
    KvDType,
    archive_arguments,
    bytes_of,
    check_bool,
    check_int,
    kv_dtypes,
    thread_count,
)
from h2o_cpp.model.model_files import find_model
from h2o_cpp.model.policy import Policy

Positions: TypeAlias = Literal["auto", "original", "rolling"]


def open_model(
    path: str | os.PathLike[str],
    *,
    device: str,
    threads: int | None,
    max_resident: int | str | None = None,
    exact: bool = False,
) -> _core.Model:
    """Load a GGUF file; on a terminal, a progress bar appears after a second.

    path, device, threads, max_resident, exact: as for Generator.

    Raises FileNotFoundError, ValueError, OSError and MemoryError.
    """
    file = find_model(path)
    from tqdm import tqdm  # type: ignore[import-untyped]  # a tenth of the time to import this

    with tqdm(
        desc="weights", unit="B", unit_scale=True, unit_divisor=1024, delay=1, leave=False,
        disable=None,
    ) as bar:  # fmt: skip

        def show(loaded: int, total: int) -> None:
            bar.total = total
            bar.update(loaded - bar.n)

        return _core.Model(
            file,
            device=check_device(device),
            threads=thread_count(threads),
            progress=show,
            max_resident=0 if max_resident is None else bytes_of("max_resident", max_resident),
            exact=check_bool("exact", exact),
        )


def open_session(
    model: _core.Model,
    policy: Policy | Sequence[Policy],
    *,
    n_ctx: int,
    n_batch: int,
    n_sequences: int = 1,
    kv_dtype: KvDType = "f16",
    positions: Positions = "auto",
    archive: KvDType | None = None,
    archive_pages: int | None = None,
    archive_dir: str | os.PathLike[str] | None = None,
    archive_heads: float | None = None,
) -> _core.Session:
    """Empty sequences of `model`, each with a cache bounded by `policy`.

    policy: one for all layers, or one per layer. The rest as for Generator.

    Raises ValueError, MemoryError and OSError.
    """
    check_positions(positions)
    return _core.Session(
        model,
        policies=core_policies(policy),
        n_ctx=check_int("n_ctx", n_ctx, 1),
        n_batch=check_int("n_batch", n_batch, 1),
        n_sequences=n_sequences,
        **kv_dtypes(kv_dtype),
        positions=positions,
        **archive_arguments(archive, archive_pages, archive_dir, archive_heads),
    )


def core_policies(policy: Policy | Sequence[Policy]) -> list[_core.KvPolicy]:
    """For the core: one policy, or one per layer. Raises ValueError for an empty list."""
    policies = [policy] if isinstance(policy, Policy) else policy
    if not policies:
        raise ValueError("policy is an empty list, expected one Policy per layer")
    return [one.core() for one in policies]


def check_device(device: object) -> str:
    """A device's name. Raises TypeError; the core checks which devices exist."""
    if not isinstance(device, str):
        raise TypeError(f"device={device!r}, expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return device


def check_positions(positions: object) -> Positions:
    """Raises ValueError for unknown positions."""
    if positions not in ("auto", "original", "rolling"):
        raise ValueError(f"positions={positions!r}, expected 'auto', 'original' or 'rolling'")
    return positions


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
