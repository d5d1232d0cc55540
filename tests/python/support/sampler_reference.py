"""The samplers in numpy, based on sorting: the reference for the core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEFAULT_ORDER = (
    ["penalties", "dry", "top_n_sigma", "temperature", "top_k", "typ_p", "top_p", "min_p", "xtc"]
)  # fmt: skip
OFF: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "samplers": None,
    "seed": 0,
}


class Mt19937x64:
    """The 64-bit Mersenne Twister (Nishimura and Matsumoto), as in C++."""

    def __init__(self, seed: int) -> None:
        self.state = [seed]
        for i in range(1, 312):
            last = self.state[-1]
            self.state.append((6364136223846793005 * (last ^ last >> 62) + i) % 2**64)
        self.next = 312

    def __call__(self) -> int:
        if self.next == 312:
            for i in range(312):
                bits = (self.state[i] & ~(2**31 - 1) % 2**64) | (
                    self.state[(i + 1) % 312] & 2**31 - 1
                )
                twist = 0xB5026F5AA96619E9 if bits & 1 else 0
                self.state[i] = self.state[(i + 156) % 312] ^ bits >> 1 ^ twist
            self.next = 0
        x = self.state[self.next]
        self.next += 1
        x ^= x >> 29 & 0x5555555555555555
        x ^= x << 17 & 0x71D67FFFEDA60000
        x ^= x << 37 & 0xFFF7EEE000000000
        return x ^ x >> 43

    def uniform(self) -> float:
        """Uniform from 0 to 1, with 53 bits."""
        return (self() >> 11) * 2.0**-53


def longest_repetitions(
    tokens: Sequence[int], least: int, breakers: Sequence[int]
) -> dict[int, int]:
    """Length of the repetition that each token would extend, if >= `least`, by brute force."""
    limit = len(tokens)
    for i in range(len(tokens)):
        if tokens[-1 - i] in breakers:
            limit = i
            break
    found: dict[int, int] = {}
    for end in range(1, len(tokens)):  # tokens[end] followed tokens[:end]
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        length = min(length, limit)
        if length >= least:
            found[tokens[end]] = max(found.get(tokens[end], 0), length)
    return found


class Reference:
    """A sampler with `options` on top of the defaults OFF.

    After `sample`, `left` and `p` are the remaining candidates and their probabilities; `margin` is
    the relative distance of the closest decision, for comparisons despite rounding.
    """

    def __init__(self, n_vocab: int, options: dict[str, Any], breakers: Sequence[int] = ()) -> None:
        self.o = {**OFF, **options}
        self.n_vocab = n_vocab
        self.breakers = breakers
        self.tokens: list[int] = []
        self.random = Mt19937x64(self.o["seed"])
        self.mu = 2 * self.o["mirostat_tau"]
        self.margin = math.inf

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def sample(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None = None) -> int:
        o = self.o
        self.margin = math.inf
        x = logits.astype(np.float64)
        if allowed is not None:
            x[~allowed] = -np.inf
        steps = DEFAULT_ORDER if o["samplers"] is None else list(o["samplers"])
        for token, bias in o["logit_bias"].items():
            x[token] += bias
        if "penalties" in steps:
            self._penalize(x)
        if "dry" in steps and o["dry_multiplier"] > 0 and o["dry_penalty_last_n"] != 0:
            self._penalise_repetitions(x)
        if "temperature" in steps and o["temperature"] == 0 and o["dynatemp_range"] == 0:
            return int(np.argmax(x))
        order = np.lexsort((np.arange(len(x)), -x))
        order = order[np.isfinite(x[order])]
        self.ids, self.x = order, x[order]
        for step in steps:
            if o["mirostat"] and step != "temperature":
                continue
            getattr(self, f"_{step}", lambda: None)()
        if o["mirostat"]:
            getattr(self, f"_mirostat_{o['mirostat']}")()
        p = self._p()
        self.left, self.p = self.ids, p
        u = self.random.uniform()
        sums = np.cumsum(p) / p.sum()
        self._near(sums[:-1], u)
        at = min(int(np.searchsorted(sums, u, side="right")), len(p) - 1)
        if o["mirostat"]:
            self.mu -= o["mirostat_eta"] * (-math.log2(p[at]) - o["mirostat_tau"])
        return int(self.ids[at])

    def _near(self, values: NDArray[np.float64] | float, limit: float) -> None:
        values = np.atleast_1d(values)
        values = values[np.isfinite(values)]
        if len(values):
            gap = np.min(np.abs(values - limit)) / max(abs(limit), 1e-9)
            self.margin = min(self.margin, float(gap))

    def _p(self) -> NDArray[np.float64]:
        e = np.exp(self.x - self.x.max())
        p: NDArray[np.float64] = e / e.sum()
        return p

    def _keep(self, which: Any) -> None:
        self.ids, self.x = self.ids[which], self.x[which]
        order = np.lexsort((self.ids, -self.x))
        self.ids, self.x = self.ids[order], self.x[order]

    def _penalize(self, x: NDArray[np.float64]) -> None:
        o, n = self.o, self.o["repeat_last_n"]
        recent = self.tokens if n < 0 else self.tokens[-n:] if n else []
        for token in set(recent):
            x[token] *= o["repeat_penalty"] if x[token] <= 0 else 1 / o["repeat_penalty"]
            x[token] -= recent.count(token) * o["frequency_penalty"] + o["presence_penalty"]

    def _penalise_repetitions(self, x: NDArray[np.float64]) -> None:
        o, n = self.o, self.o["dry_penalty_last_n"]
        recent = self.tokens if n < 0 else self.tokens[-n:]
        least = o["dry_allowed_length"]
        for token, length in longest_repetitions(recent, least, self.breakers).items():
            x[token] -= o["dry_multiplier"] * o["dry_base"] ** (length - least)

    def _top_n_sigma(self) -> None:
        if (n := self.o["top_n_sigma"]) > 0:
            limit = self.x.max() - n * self.x.std()
            self._near(self.x, limit)
            self._keep(self.x >= limit)

    def _temperature(self) -> None:
        t, spread = self.o["temperature"], self.o["dynatemp_range"]
        if spread > 0:
            if len(self.x) == 1:
                return
            p = self._p()
            entropy = -(p[p > 0] * np.log(p[p > 0])).sum() / math.log(len(p))
            low, high = max(0.0, t - spread), t + spread
            t = low + (high - low) * entropy ** self.o["dynatemp_exponent"]
        self.x = self.x / t

    def _top_k(self) -> None:
        if self.o["top_k"] > 0:
            self._keep(slice(self.o["top_k"]))

    def _top_p(self) -> None:
        if self.o["top_p"] < 1:
            sums = np.cumsum(self._p())
            self._near(sums, self.o["top_p"])
            self._keep(slice(1 + int(np.searchsorted(sums, self.o["top_p"]))))

    def _min_p(self) -> None:
        if self.o["min_p"] > 0:
            relative = np.exp(self.x - self.x.max())
            self._near(relative, self.o["min_p"])
            self._keep(relative >= self.o["min_p"])

    def _typ_p(self) -> None:
        if self.o["typical_p"] < 1:
            p = self._p()
            surprise = -np.log(p)
            distance = np.abs(surprise - (p * surprise).sum())
            order = np.lexsort((np.arange(len(p)), distance))
            sums = np.cumsum(p[order])
            self._near(sums, self.o["typical_p"])
            n = 1 + int(np.searchsorted(sums, self.o["typical_p"], side="right"))
            if n < len(p):  # the last token kept and the next one could swap
                self._near(distance[order[n]], distance[order[n - 1]])
            self._keep(order[:n])

    def _xtc(self) -> None:
        o = self.o
        if o["xtc_probability"] <= 0 or o["xtc_threshold"] > 0.5 or len(self.x) < 2:
            return
        if self.random.uniform() >= o["xtc_probability"]:
            return
        p = self._p()
        self._near(p, o["xtc_threshold"])
        n = int((p >= o["xtc_threshold"]).sum())
        if n >= 2:
            self._keep(slice(n - 1, None))

    def _mirostat_1(self) -> None:
        p = self._p()[:100]
        ranks = np.arange(1, len(p))
        t, b = np.log((ranks + 1) / ranks), np.log(p[:-1] / p[1:])
        s = (t * b).sum() / (t * t).sum()
        k = ((s - 1) * 2**self.mu / (1 - self.n_vocab ** -(s - 1))) ** (1 / s)
        self._near(k - round(k) + 1, 1)
        self._keep(slice(max(1, int(k))))

    def _mirostat_2(self) -> None:
        surprise = -np.log2(self._p())
        self._near(surprise, self.mu)
        self._keep(slice(max(1, int((surprise <= self.mu).sum()))))
