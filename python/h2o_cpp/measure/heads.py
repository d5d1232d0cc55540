"""Which KV heads find facts far back in a prompt ("retrieval heads", arXiv 2404.15574)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.budget.policy import Policy
from h2o_cpp.measure.retrieval.tasks import Sample
from h2o_cpp.model.session import open_session, read_tokens

# The key of a GGUF file: layer * n_kv_heads + kv_head of each ranked head, the first first.
RETRIEVAL_HEADS = "h2o.retrieval_heads"
TASKS = ("needle", "kv", "copy")


@dataclass(frozen=True)
class RankedHead:
    """A KV head, and its part in all attention to facts while their answers are written."""

    layer: int
    kv_head: int
    share: float  # of all KV heads' attention; their sum is 1


def rank_heads(
    model: _core.Model,
    samples: Sequence[Sample],
    *,
    n_ctx: int,
    progress: Callable[[int], object] = lambda n: None,
) -> list[RankedHead]:
    """The KV heads of layers without a window, the most important first.

    samples: prompts of at most n_ctx tokens with their answers. Each counts equally: the share is
        the mean over samples of a head's attention to the fact divided by that of all heads.
    progress: called with the number of tokens read since the last call.

    Raises ValueError and MemoryError.
    """
    policy = Policy.h2o(n_ctx - 1, 1)  # keeps every token, with the attention that it received
    session = open_session(model, policy, n_ctx=n_ctx, n_batch=min(n_ctx, 512))
    shares = np.zeros((model.n_layers, model.n_kv_heads))
    recorded: list[int] = []  # layers: with a window, attention is not
    for sample in samples:
        session.reset(0)
        prompt, fact = sample.prompt, slice(len(sample.before), len(sample.before + sample.fact))
        read_tokens(session, np.asarray(prompt[:-1], np.int32), progress)
        recorded = [i for i in range(model.n_layers) if session.kept(i, 0, 0)[1].any()]
        if not recorded:
            raise ValueError("every layer has a window: no head can find facts far back")
        before = _attention(session, model, fact)
        answer = [prompt[-1], *sample.answer[:-1]]
        read_tokens(session, np.asarray(answer, np.int32), progress)
        gained = _attention(session, model, fact) - before
        shares += gained / max(gained.sum(), np.finfo(np.float64).tiny) / len(samples)
    order = np.argsort(-shares, axis=None, kind="stable")
    return [
        RankedHead(int(layer), int(kv_head), float(shares[layer, kv_head]))
        for layer, kv_head in zip(*np.unravel_index(order, shares.shape), strict=True)
        if layer in recorded and kv_head < model.layer_heads[layer][0]
    ]


def _attention(session: _core.Session, model: _core.Model, tokens: slice) -> NDArray[np.float64]:
    """The attention [n_layers, n_kv_heads] that these positions have received so far."""
    sums = np.zeros((model.n_layers, model.n_kv_heads))
    for layer, kv_head in np.ndindex(sums.shape):
        positions, scores = session.kept(layer, kv_head, 0)
        wanted = (positions >= tokens.start) & (positions < tokens.stop)
        sums[layer, kv_head] = scores[wanted].sum(dtype=np.float64)
    return sums
