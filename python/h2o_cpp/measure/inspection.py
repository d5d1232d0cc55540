"""Inspection: what a bounded cache kept of a text, and when it evicted the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp import _core
from h2o_cpp.arguments import check_int
from h2o_cpp.budget.policy import Policy
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.model.visible_pieces import VisiblePieces
from h2o_cpp.options import CacheOptions, make_options

# Observations of a head per text, a few seconds' worth. With more, the cache is not observed after
# every step.
_MAX_LOOKS = 2**17


@dataclass(frozen=True)
class Summary:
    """The tokens that one layer, or one of its KV heads, keeps at the end of a text."""

    kept: int  # tokens; the same in every KV head
    evicted: int
    oldest: int  # lowest kept position
    score_share: float | None  # kept tokens' share of all scores; None without scores
    common_share: float  # share of the kept tokens that every KV head of the layer keeps; 0 of none


@dataclass(frozen=True)
class Inspection:
    """A text, and what every layer and KV head kept of it after each step."""

    model: str  # file name
    policy: Policy
    n_prompt: int  # tokens of the given text, before generated ones
    tokens: NDArray[np.int32]  # [n]
    pieces: list[str]  # [n], printable text of each token
    seen: NDArray[np.int32]  # tokens read at each observation, ascending
    # [n_layers, n_kv_heads, n]: the entry of `seen` at which the token was first found evicted; 0
    # if it never was. Layers without a cache keep no tokens.
    evicted_at: NDArray[np.int32]
    # [n_layers, n_kv_heads, n]: the token's score when it was last seen in the cache; 0 if it never
    # was, and for policies without scores.
    scores: NDArray[np.float32]

    def kept(self, seen: int | None = None) -> NDArray[np.bool_]:
        """Whether each token was kept after `seen` tokens (default: all).

        [n_layers, n_kv_heads, n]; exact for the entries of `self.seen`.
        """
        n = len(self.tokens)
        seen = n if seen is None else check_int("seen", seen, 0, n)
        alive = (self.evicted_at == 0) | (self.evicted_at > seen)
        return np.asarray(alive & (np.arange(n) < seen))

    def summary(self, layer: int, kv_head: int | None = None) -> Summary:
        """Returns what a layer keeps at the end: all of its KV heads, or one."""
        n_layers, n_kv_heads, n = self.evicted_at.shape
        layer = check_int("layer", layer, 0, n_layers - 1)
        heads = slice(None)
        if kv_head is not None:
            kv_head = check_int("kv_head", kv_head, 0, n_kv_heads - 1)
            heads = slice(kv_head, kv_head + 1)
        of_layer = self.kept()[layer]
        kept, scores = of_layer[heads], self.scores[layer, heads].astype(np.float64)
        n_kept = int(kept[0].sum())
        return Summary(
            kept=n_kept,
            evicted=n - n_kept,
            oldest=int(kept.any(axis=0).argmax()),
            score_share=float(scores[kept].sum() / scores.sum()) if scores.any() else None,
            common_share=int(of_layer.all(axis=0).sum()) / max(n_kept, 1),
        )

    def to_dict(self) -> dict[str, Any]:
        """Lists and numbers for json.dumps; scores are rounded to four decimals."""
        return {
            "model": self.model,
            "policy": {
                "sinks": self.policy.n_sinks,
                "heavy": self.policy.n_heavy,
                "recent": self.policy.n_recent,
            },
            "n_prompt": self.n_prompt,
            "tokens": self.tokens.tolist(),
            "pieces": self.pieces,
            "seen": self.seen.tolist(),
            "evicted_at": self.evicted_at.tolist(),
            "scores": self.scores.astype(np.float64).round(4).tolist(),
        }

    def to_html(self) -> str:
        """A self-contained HTML page."""
        page = files("h2o_cpp.measure").joinpath("inspection.html").read_text(encoding="utf-8")
        # In a script element, only "<" could end the JSON ("</script>", "<!--").
        data = json.dumps(self.to_dict(), separators=(",", ":")).replace("<", "\\u003c")
        return page.replace("{{inspection}}", data, 1)


def inspect(
    model: _core.Model,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    policy: Policy,
    *,
    max_tokens: int = 0,
    **cache: Any,
) -> Inspection:
    """Read a text with a cache and observe it after each step.

    max_tokens: continue the text greedily by at most this many tokens, fewer if the text or n_ctx
        ends (default: as for Generator).
    cache: options of the cache, as for Generator. n_batch=1, the default, shows every eviction; use
        a Generator's to see what it keeps of a prompt.

    An observation costs a call per layer and KV head. If steps times heads exceed 131072, the cache
    is observed only every few tokens; see `Inspection.seen`.

    Raises ValueError for an empty text, one longer than n_ctx, and options out of range.
    """
    given = make_options(CacheOptions, {"policy": policy, "n_batch": 1, **cache})
    options = given.for_model(ModelFile(model.shards))
    n_ctx, n_batch = options.context, options.rows_on(model.backend)
    check_int("max_tokens", max_tokens, 0)
    if not 0 < len(tokens) <= n_ctx:
        raise ValueError(f"the text has {len(tokens)} tokens, expected 1 to n_ctx={n_ctx}")
    session = _core.Session(model, replace(options, n_batch=min(n_batch, len(tokens))).core())
    text = list(tokens)
    n_most = min(len(text) + max_tokens, n_ctx)
    record = _Record(session, model, n_most)
    n_steps = ceil(len(text) / n_batch) + n_most - len(text)
    every = ceil(n_steps * model.n_layers * model.n_kv_heads / _MAX_LOOKS)
    with tqdm(total=n_most, unit="token", disable=None, leave=False) as bar:
        n_read = 0
        for step in range(1, n_steps + 1):
            fed = np.asarray(text[n_read : n_read + n_batch], np.int32)
            logits = session.step([(0, fed)])
            n_read += len(fed)
            bar.update(len(fed))
            if n_read == len(text) < n_most:
                token = int(logits[-1].argmax())
                if token not in tokenizer.end_tokens:
                    text.append(token)
            if step % every == 0 or n_read == len(text):
                record.observe()
            if n_read == len(text):
                break
    pieces = VisiblePieces(tokenizer)
    return Inspection(
        model=Path(model.file.path).name,
        policy=policy,
        n_prompt=len(tokens),
        tokens=np.asarray(text, np.int32),
        pieces=[pieces.push(token) for token in text],
        seen=np.asarray(record.seen, np.int32),
        evicted_at=record.evicted_at[..., : len(text)],
        scores=record.scores[..., : len(text)],
    )


class _Record:
    """The observations of a session's cache."""

    def __init__(self, session: _core.Session, model: _core.Model, n: int) -> None:
        self._session = session
        self.seen: list[int] = []
        self.evicted_at = np.zeros((model.n_layers, model.n_kv_heads, n), np.int32)
        self.scores = np.zeros(self.evicted_at.shape, np.float32)

    def observe(self) -> None:
        n = self._session.tokens_seen(0)
        self.seen.append(n)
        for layer, kv_head in np.ndindex(self.evicted_at.shape[:2]):
            positions, scores = self._session.kept(layer, kv_head, 0)
            evicted_at = self.evicted_at[layer, kv_head, :n]
            gone = evicted_at == 0
            gone[positions] = False
            evicted_at[gone] = n
            self.scores[layer, kv_head, positions] = scores
