"""Predicted speed, by the number of sequences and the weights in memory (docs/plan.md).

A model has L layers, W bytes of weights and F operations per token, F' more for a token whose
logits are needed. A sequence has P prompt tokens and n generated ones, and reads K bytes of cache
per generated token. Memory gives B bytes/s, storage S, arithmetic G operations/s. k sequences run
at once, each followed by another when it ends.

1. A prompt has c = ceil(P / n_batch) chunks, and a pass at most one: each sequence is charged
   q = max(c, (c + n) / k) passes.
2. A pass takes t = W / B + ((P + n) F + (c + n) F') / (q G) + n K / (q B), an upper estimate, since
   reading and computing overlap.
3. Each of m layers that take turns is read in b = (their bytes) / (m S), while the one before
   computes for t1 = (t - rest) / L; the rest is what is in no layer. A pass waits
   m b - (m - 1) min(t1, b) - min(b, t1 (1 + L - m) + rest) longer.
4. Tokens per second: n / (q t).
5. Of a mixture a pass needs E (1 - (1 - u / E)^r) of E experts of a layer, for r rows that each use
   u of them at random. It reads these from memory, and from storage those that do not stay. Experts
   used more often than at random are found more often, so this is a lower bound.

Memory: tensors outside the layers, the layers that stay, twice the largest layer if any take turns
(of mixtures the experts that stay, all experts of a layer and all other tensors), k caches,
activations of n_batch + k - 1 rows, logits of k.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

CLOSE = 0.97  # candidates this close to the fastest are equivalent
_LOGITS_ROWS = 32  # least rows of a session's logits
MAX_SEQUENCES = 4096


@dataclass(frozen=True)
class Speeds:
    """The machine's speeds, with the threads that compute."""

    memory: float  # bytes per second from memory
    storage: float  # bytes per second from the model's file
    flops: float  # floating-point operations per second in matrix products


@dataclass(frozen=True)
class Experts:
    """Experts of a mixture."""

    count: int  # per layer
    used: int  # per token and layer
    layers: tuple[int, ...]  # bytes of the experts of each layer

    def needed(self, rows: float) -> float:
        """The expected number of experts per layer that `rows` tokens use, at random."""
        return self.count * (1 - float((1 - self.used / self.count) ** rows))


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, in bytes and operations."""

    layers: tuple[int, ...]  # bytes of weights
    others: int  # bytes of weights outside the layers
    others_read: int  # of these, bytes read per pass; one row of lookup tables
    layer_flops: int  # per token, in all layers
    output_flops: int  # per token whose logits are needed
    row_bytes: int  # activations per row of a batch
    logits_bytes: int  # per row of logits
    experts: Experts | None = None


@dataclass(frozen=True)
class Job:
    """The workload: tokens of each prompt, and n generated tokens."""

    prompt: int
    n: int
    n_batch: int
    slab_bytes: int  # cache per sequence
    kv_read: float  # mean bytes of K, V and states read per decoded token


@dataclass(frozen=True)
class Candidate:
    """A configuration and its predicted speed.

    The last four fields are seconds per pass; storage_seconds is the time spent waiting.
    """

    sequences: int
    streamed_layers: int  # read again in every pass
    streamed_experts: int  # per layer, read when needed
    weight_bytes: int  # resident
    streamed_bytes: int  # read from the file per pass
    cache_bytes: int
    activation_bytes: int
    tokens_per_second: float  # generated, by all sequences, including the time of prompts
    weight_seconds: float
    arithmetic_seconds: float
    cache_seconds: float
    storage_seconds: float

    @property
    def streams(self) -> bool:
        """Whether some weights are not resident."""
        return self.streamed_layers + self.streamed_experts > 0

    @property
    def pass_seconds(self) -> float:
        """Seconds per forward pass."""
        parts = (self.weight_seconds, self.arithmetic_seconds, self.cache_seconds)
        return sum(parts) + self.storage_seconds

    @property
    def bytes(self) -> int:
        """Total memory."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes


def candidates(
    sizes: Sizes, job: Job, speeds: Speeds, memory: int, most: int = MAX_SEQUENCES
) -> list[Candidate]:
    """Candidates that fit: powers of two with all weights resident, and the largest number
    otherwise."""
    found = []
    for n_kept, weight_bytes in placements(sizes):
        room = memory - weight_bytes
        k = bisect_right(range(1, most + 1), room, key=lambda k: _beside_weights(sizes, job, k))
        counts = {k} if k else set()
        if n_kept == (sizes.experts.count if sizes.experts else len(sizes.layers)):
            counts |= {2**i for i in range(k.bit_length())}
        found += [_predict(sizes, job, speeds, n_kept, weight_bytes, i) for i in sorted(counts)]
    return found


def choose(found: Sequence[Candidate]) -> Candidate:
    """Of the nearly fastest, the one that reads least, then the one with fewest sequences."""
    enough = CLOSE * max(one.tokens_per_second for one in found)
    near = [one for one in found if one.tokens_per_second >= enough]
    return min(near, key=lambda one: (one.streamed_bytes, one.sequences))


def placements(sizes: Sizes) -> list[tuple[int, int]]:
    """Possible numbers of resident layers, or experts per layer, with the bytes of weights.

    As in the core: besides resident layers there is room for two streamed ones; besides resident
    experts for all of one layer.
    """
    n, others, experts = len(sizes.layers), sizes.others, sizes.experts
    if experts is not None:
        whole, all_experts = others + sum(sizes.layers), sum(experts.layers)
        least = whole - all_experts + max(experts.layers)
        fewer = [(i, least + i * (all_experts // experts.count)) for i in range(experts.count)]
        return [(experts.count, whole), *(one for one in reversed(fewer) if one[1] < whole)]
    found = [(n, others + sum(sizes.layers))]
    for n_kept in range(n - 3, -1, -1):
        found.append((n_kept, others + 2 * max(sizes.layers) + sum(sizes.layers[:n_kept])))
    return found


def _beside_weights(sizes: Sizes, job: Job, k: int) -> int:
    """Bytes of the caches of k sequences and of a pass's activations."""
    return k * job.slab_bytes + _activations(sizes, job, k)


def _activations(sizes: Sizes, job: Job, k: int) -> int:
    rows = job.n_batch + max(k - 1, 0)  # as in Generator's session
    return rows * sizes.row_bytes + max(k, _LOGITS_ROWS) * sizes.logits_bytes


def least_bytes(sizes: Sizes, job: Job) -> int:
    """The least memory for one sequence."""
    return min(weight for _, weight in placements(sizes)) + _beside_weights(sizes, job, 1)


def _predict(
    sizes: Sizes, job: Job, speeds: Speeds, n_kept: int, weight_bytes: int, k: int
) -> Candidate:
    """The prediction for k concurrent sequences, each replaced when it ends."""
    n_layers, experts = len(sizes.layers), sizes.experts
    m = 0 if experts else n_layers - n_kept  # streamed layers
    streamed = float(sum(sizes.layers[n_kept:])) if m else 0.0
    # A sequence takes `chunks` passes for its prompt and n passes for its tokens; a pass has at
    # most one chunk.
    chunks = ceil(job.prompt / job.n_batch)
    passes = max(chunks, (chunks + job.n) / k)  # per finished sequence

    read_bytes = float(sum(sizes.layers) + sizes.others_read)
    if experts:
        with_chunk = min(1, chunks / passes)  # share of passes with a chunk
        needed = with_chunk * experts.needed(min(job.prompt, job.n_batch) + k - 1)
        needed += (1 - with_chunk) * experts.needed(k)
        share = needed / experts.count
        read_bytes -= (1 - share) * sum(experts.layers)
        streamed = share * sum(experts.layers) * (1 - n_kept / experts.count)
    read = read_bytes / speeds.memory
    layer_flops = (job.prompt + job.n) * sizes.layer_flops / passes
    output_flops = (chunks + job.n) * sizes.output_flops / passes
    arithmetic = (layer_flops + output_flops) / speeds.flops
    cache = job.n * job.kv_read / passes / speeds.memory

    wait = streamed / speeds.storage if experts else 0.0
    if m:
        layers = sum(sizes.layers) / speeds.memory + layer_flops / speeds.flops + cache
        rest = sizes.others_read / speeds.memory + output_flops / speeds.flops
        one, bring = layers / n_layers, streamed / m / speeds.storage
        # The last streamed layer, resident layers and other weights hide one read.
        hidden = (m - 1) * min(one, bring) + min(bring, one * (1 + n_kept) + rest)
        wait = m * bring - hidden
    seconds = passes * (read + arithmetic + cache + wait)
    return Candidate(
        sequences=k,
        streamed_layers=m,
        streamed_experts=experts.count - n_kept if experts else 0,
        weight_bytes=weight_bytes,
        streamed_bytes=round(streamed),
        cache_bytes=k * job.slab_bytes,
        activation_bytes=_activations(sizes, job, k),
        tokens_per_second=job.n / seconds,
        weight_seconds=read,
        arithmetic_seconds=arithmetic,
        cache_seconds=cache,
        storage_seconds=wait,
    )
