"""Opening sessions: a model, a policy and the sizes, as the core takes them."""

from __future__ import annotations

from h2o_cpp import _core
from h2o_cpp.arguments import kv_dtypes
from h2o_cpp.policy import Policy


def open_session(
    model: _core.Model,
    policy: Policy,
    *,
    n_ctx: int,
    n_batch: int,
    n_sequences: int = 1,
    kv_dtype: str | tuple[str, str] = "f16",
) -> _core.Session:
    """Sequences of `model`, empty, each with a cache that `policy` bounds.

    Raises ValueError and MemoryError.
    """
    return _core.Session(
        model,
        **policy.limits(),
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_sequences=n_sequences,
        **kv_dtypes(kv_dtype),
    )
