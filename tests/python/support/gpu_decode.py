"""Decode steps whose logits are compared between settings and devices.

    gpu_decode.py DEVICE STEPS TO MODEL...

writes the logits to an .npz, named by model and policy, and prints the back end's name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.budget.policy import Policy
from h2o_cpp.model.session import open_session

_PROMPT, _SEQUENCES = 16, 3
_POLICIES = {"full": Policy.full(), "h2o": Policy.h2o(heavy=8, recent=8)}


def decode(model: _core.Model, policy: Policy, n_steps: int) -> NDArray[np.float32]:
    """Logits [steps, sequences, n_vocab] of at most n_steps decode steps with fixed tokens."""
    n_ctx = min(_PROMPT + n_steps + 1, model.n_ctx_train)
    session = open_session(model, policy, n_ctx=n_ctx, n_batch=_PROMPT, n_sequences=_SEQUENCES)
    random = np.random.default_rng(1)
    texts = random.integers(3, model.n_vocab, (_SEQUENCES, n_ctx), np.int32)
    for sequence, text in enumerate(texts):
        session.step([(sequence, text[:_PROMPT])])
    return np.stack(
        [
            session.step([(s, text[i : i + 1]) for s, text in enumerate(texts)])
            for i in range(_PROMPT, n_ctx - 1)
        ]
    )


def main(device: str, n_steps: int, to: Path, paths: list[Path]) -> None:
    found = {}
    for path in paths:
        model = _core.Model(path, device=device, threads=2)
        for name, policy in _POLICIES.items():
            found[f"{path.stem}, {name}"] = decode(model, policy, n_steps)
        backend = model.backend
    np.savez(to, allow_pickle=False, **found)
    print(backend, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), [*map(Path, sys.argv[4:])])
