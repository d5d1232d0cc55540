"""Measurements of a model of a real shape on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from pathlib import Path
from statistics import fmean, median
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from h2o_bench import gpu_machine
from h2o_bench.llama_tools import LlamaTools
from h2o_bench.texts import Texts
from h2o_cpp import _core
from h2o_cpp.budget.policy import Policy, budget_policy, fraction_of, named_policy
from h2o_cpp.convert.conversion import FAMILIES
from h2o_cpp.measure.traffic import decode_weight_bytes, kv_bytes, prefill_flops, weights
from h2o_cpp.model.session import open_model
from h2o_cpp.options import capacity
from support.shapes import config
from support.synthetic import write_model

Cells: TypeAlias = Mapping[str, Any]
Measurement: TypeAlias = tuple[Cells, Callable[[], Cells]]  # what it is of, and what measures it
_SHARE = 0.2  # of a context, that bounded caches keep
_BYTES = {"F16": 2.0, "Q8_0": 1.07, "Q4_K_M": 0.62}  # per weight
_BLOCK = 8  # steps of a policy before the next one's turn


class Grid(NamedTuple):
    """The contexts after which a model decodes one and many sequences."""

    alone: Sequence[int]
    together: Sequence[int]


class Generation(NamedTuple):
    """Prompts and outputs of a length in batches of several sizes.

    equal_to: batches whose full cache is as large as that of a bounded batch to measure.
    """

    prompt: int
    generated: int
    batches: Sequence[int]
    equal_to: Sequence[int] = ()
    is_offloaded: bool = False  # all weights that can be are in host memory


@dataclass(frozen=True)
class Plan:
    """The subject of a measurement, and its amount."""

    grid: Mapping[tuple[str, str], Grid]
    paper: Mapping[tuple[str, str], Sequence[Generation]]
    scores: tuple[str, str]
    long_model: tuple[str, str]
    changes: dict[str, int] = field(default_factory=dict)  # for every config
    copy_bytes: int = 1 << 32
    matmul_size: int = 8192
    slots: Sequence[int] = (128, 819, 4096)
    slots_batches: Sequence[int] = (1, 8)
    n_steps: int = 160
    batch: int = 24
    fixed: int = 1024  # slots
    n_batch: int = 8192  # tokens read in one pass
    n_warm: int = 4  # steps before those that count
    n_timed: int = 24
    prompts: Sequence[int] = (512, 2048, 8192)
    long: Sequence[int] = (1000, 10000, 100000)
    n_paper: int = 16  # steps at the beginning, in the middle and at the end
    rounds: int = 3
    most_seconds: float = 8.0  # for reading the context of a cell
    least_seconds: float = 5.0  # that a measurement needs

    @property
    def models(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys([*self.grid, *self.paper]))

    def has(self, section: str, *model: str) -> bool:
        """Whether a section has a model."""
        if section in ("scores", "long"):
            return model == (self.scores if section == "scores" else self.long_model)
        return model in (self.paper if section == "paper" else self.grid)

    @property
    def n_positions(self) -> int:
        """Positions that models have for all sections but the long text."""
        longest = [max(self.slots) + 2 * self.n_steps, *self.prompts]
        longest += [n for grid in self.grid.values() for n in (*grid.alone, *grid.together)]
        longest += [g.prompt + g.generated for several in self.paper.values() for g in several]
        return max(longest) + self.n_warm + self.n_timed + 64


_ALL, _SHORT = (128, 2048, 8192, 32768), (128, 2048)
FULL = Plan(
    grid={
        ("LLaMA-3-8B", "Q4_K_M"): Grid(_ALL, _ALL),
        ("LLaMA-7B", "F16"): Grid(_ALL, _ALL),
        ("LLaMA-7B", "Q4_K_M"): Grid(_ALL, _SHORT),
        ("LLaMA-7B", "Q8_0"): Grid(_ALL, _SHORT),
        ("OPT-6.7B", "F16"): Grid(_ALL, _SHORT),
        ("Mistral-7B-v0.1", "Q4_K_M"): Grid((128, 8192), (128,)),  # whose layers have a window
        ("LLaMA-3-8B", "F16"): Grid(_ALL, _SHORT),
        ("GPT-NeoX-20B", "Q4_K_M"): Grid((128, 2048, 8192), (128,)),
        ("LLaMA-3-8B", "Q8_0"): Grid(_SHORT, (128,)),
        ("OPT-6.7B", "Q4_K_M"): Grid(_SHORT, (128,)),
        ("GPT-NeoX-20B", "F16"): Grid(_SHORT, (128,)),
    },
    paper={
        ("OPT-6.7B", "F16"): (
            Generation(512, 1024, (4, 16, 64), (16, 64)),
            Generation(2048, 2048, (24, 64)),
            Generation(512, 512, (64,), (64,)),
            Generation(512, 32, (64,), (64,)),
            Generation(7000, 1024, (4,), (4,)),
            Generation(512, 1024, (16,), (16,), is_offloaded=True),
        ),
        ("OPT-30B", "Q4_K_M"): (Generation(7000, 1024, (1,), (1,)),),
    },
    scores=("OPT-6.7B", "F16"),
    long_model=("LLaMA-3-8B", "Q4_K_M"),
)
# A quick check on any machine, and on an emulated GPU: of the shapes only the architecture is left.
QUICK = Plan(
    grid={
        ("SmolLM2-135M", "Q4_K_M"): Grid((16, 40), (40,)),
        ("OPT-1.3B", "F16"): Grid((16,), (16,)),
    },
    paper={
        ("OPT-1.3B", "F16"): (
            Generation(16, 20, (1, 3), (3,)),
            Generation(16, 8, (2,), (2,), is_offloaded=True),
        )
    },
    scores=("OPT-1.3B", "F16"),
    long_model=("SmolLM2-135M", "Q4_K_M"),
    changes={
        **{"num_hidden_layers": 2, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128},
        **{"intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2},
        "vocab_size": 512,
    },
    copy_bytes=1 << 24, matmul_size=256, slots=(16,), slots_batches=(1, 2), n_steps=8, batch=3,
    fixed=24, n_batch=32, n_warm=1, n_timed=3, prompts=(20,), long=(20, 60), n_paper=2, rounds=1,
    least_seconds=0.1,
)  # fmt: skip


def file_bytes(changes: Mapping[str, int], shape: str, dtype: str) -> float:
    """About the size of a model's file."""
    sizes = config(shape, **changes)
    specs = FAMILIES[sizes["architectures"][0]].tensors(sizes)
    return _BYTES.get(dtype, 2.0) * sum(prod(spec.written_shape) for spec in specs)


class GpuModel:
    """A model's file, and the model on the device when it is first asked for."""

    def __init__(
        self, plan: Plan, shape: str, dtype: str, directory: Path, device: str, deadline: float,
        llama_cpp: Path | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.key, self.name = plan, (shape, dtype), f"{shape} {dtype}"
        self.device, self.deadline, self.llama_cpp = device, deadline, llama_cpp
        self.path = directory / f"{shape}-{dtype}.gguf"
        n = plan.n_positions
        if config(shape)["model_type"] != "opt":  # whose positions are weights
            n = max(n, max(plan.long) + len(plan.long) * (plan.n_warm + 3 * plan.n_timed) + 64)
        write_model(self.path, config(shape, **plan.changes, max_position_embeddings=n), dtype)

    @cached_property
    def model(self) -> _core.Model:
        return _core.Model(self.path, device=self.device, threads=0)

    @cached_property
    def offloaded(self) -> _core.Model:
        """The model with as few weights on the device as possible."""
        self.release()
        try:
            open_model(self.path, device="cpu", threads=1, max_resident=1)
        except ValueError as error:  # which says how many bytes it takes
            least = int(1.02 * int(str(error).split()[-1])) + (1 << 20)  # padded on the device
        return open_model(self.path, device=self.device, threads=None, max_resident=least)

    def release(self) -> None:
        """Free what is on the device."""
        self.__dict__.pop("model", None)

    def left(self, most: float | None = None) -> float:
        """Seconds for reading a context: a limit, or less where the deadline is near."""
        return min(self.plan.most_seconds if most is None else most, self.deadline - monotonic())

    def step(self, texts: Texts, ms: Sequence[float], kept: float) -> Cells:
        """The cells of decode steps that read so many kept tokens of each sequence."""
        one = self.model
        per_token = one.n_layers * kv_bytes(one.n_kv_heads, one.head_dim, "f16")
        read = decode_weight_bytes(weights([one.file])) + len(texts) * kept * per_token
        used = gpu_machine.memory_used(self.device)
        return {
            "ms": list(ms),
            "tokens/s": 1e3 * len(texts) / median(ms),
            "GB/s": read / median(ms) / 1e6,
            "cache GiB": texts.session.cache_bytes / 2**30,
            **({} if used is None else {"device GiB": used / 2**30}),
        }


def grid(model: GpuModel) -> Iterator[Measurement]:
    """Decode after each context, by one and many sequences, with all caches that differ."""
    plan, of = model.plan, model.plan.grid[model.key]
    for batch, contexts in ((1, of.alone), (plan.batch, of.together)):
        for context in contexts:
            caches = {"full": 0, f"{plan.fixed} slots": plan.fixed}
            caches[f"hh={_SHARE}"] = fraction_of(context, _SHARE)
            for cache, slots in caches.items():
                if slots < context:
                    about = {"sequences": batch, "after": context, "cache": cache}
                    yield about, partial(decode, model, batch, context, slots)


def decode(model: GpuModel, batch: int, context: int, slots: int) -> Cells:
    """Steps after a context; 0 slots: the full cache."""
    plan = model.plan
    n = plan.n_warm + plan.n_timed
    texts = Texts(
        model.model, budget_policy(slots or None, None, context), n_ctx=context + n + 1,
        n_batch=min(plan.n_batch, context), n_sequences=batch,
    )  # fmt: skip
    texts.fill(context, most=model.left())
    texts.decode(plan.n_warm)
    ms = [1e3 * seconds for seconds in texts.decode(plan.n_timed)]
    texts.check(context + n)
    seen = context + plan.n_warm + (plan.n_timed + 1) / 2
    return model.step(texts, ms, min(slots + 1, seen) if slots else seen)


def prefill(model: GpuModel) -> Iterator[Measurement]:
    """Prompts in one piece, of which all or a share is kept."""
    for n in model.plan.prompts:
        for cache in ("full", f"hh={_SHARE}"):
            yield {"tokens": n, "cache": cache}, partial(read, model, n, cache == "full")


def read(model: GpuModel, n: int, is_full: bool) -> Cells:
    """Tokens/s of some rounds after a warm-up, and operations per second."""
    policy = Policy.full() if is_full else named_policy("h2o", fraction_of(n, _SHARE))
    texts = Texts(model.model, policy, n_ctx=n + 1, n_batch=n)
    seconds = []
    for _ in range(1 + model.plan.rounds):
        texts.reset()
        seconds.append(texts.read(n))
    texts.check(n)
    one = model.model
    # Causal attention: half of n x n products, for K and for V.
    attention = 2 * n * (n + 1) * one.n_layers * one.n_heads * one.head_dim
    flops = n * prefill_flops(weights([one.file])) + attention
    tflops = flops / median(seconds[1:]) / 1e12
    return {
        "tokens/s": [n / one for one in seconds[1:]],
        "first token, ms": 1e3 * median(seconds[1:]),
        "TFLOP/s": tflops,
    }


def scores(model: GpuModel) -> Iterator[Measurement]:
    """Steps with scores and eviction, beside a window with as many slots."""
    for batch in model.plan.slots_batches:
        for slots in model.plan.slots:
            yield {"sequences": batch, "slots": slots}, partial(compare_scores, model, batch, slots)


def compare_scores(model: GpuModel, batch: int, slots: int) -> Cells:
    """Microseconds of whole steps, the policies in turns, in caches that are full."""
    plan, n_read = model.plan, slots + 16
    everyone = {
        name: Texts(
            model.model, named_policy(name, slots), n_ctx=n_read + _BLOCK + plan.n_steps + 1,
            n_batch=min(plan.n_batch, n_read), n_sequences=batch,
        )
        for name in ("window", "h2o")
    }  # fmt: skip
    us: dict[str, list[float]] = {name: [] for name in everyone}
    for texts in everyone.values():
        texts.read(n_read)
        texts.decode(_BLOCK)
    for _ in range(plan.n_steps // _BLOCK):
        for name, texts in everyone.items():
            us[name] += [1e6 * seconds for seconds in texts.decode(_BLOCK)]
    for name, texts in everyone.items():
        texts.check(n_read + _BLOCK + len(us[name]))
    more = median(us["h2o"]) / median(us["window"]) - 1
    return {"window, us": us["window"], "h2o, us": us["h2o"], "h2o takes": f"{more:+.1%}"}


def long(model: GpuModel) -> Iterator[Measurement]:
    """Decode along one long text with a fixed number of slots."""
    plan = model.plan
    policy = Policy.h2o(plan.fixed // 2, plan.fixed - plan.fixed // 2)
    n_ctx = max(plan.long) + len(plan.long) * (plan.n_warm + 3 * plan.n_timed)
    texts = Texts(model.model, policy, n_ctx=n_ctx, n_batch=min(plan.n_batch, max(plan.long)))

    def along(context: int) -> Cells:
        texts.read(context - texts.session.tokens_seen(0), most=model.left(1e9))
        texts.decode(plan.n_warm)
        ms = [1e3 * seconds for seconds in texts.decode(2 * plan.n_timed)]
        seen = texts.session.tokens_seen(0)
        if context == max(plan.long):
            texts.check(seen)
        return model.step(texts, ms, min(plan.fixed + 1, seen))

    for context in plan.long:
        yield {"after": context, "cache": f"{plan.fixed} slots"}, partial(along, context)


def paper(model: GpuModel) -> Iterator[Measurement]:
    """Both caches at the same batches; then as many bounded ones as take the same memory."""
    for of in model.plan.paper[model.key]:
        n_ctx = of.prompt + of.generated
        bounded = budget_policy(_SHARE, None, n_ctx)
        found: dict[tuple[int, str], Cells] = {}
        what = f"{of.prompt} + {of.generated}{', offloaded' if of.is_offloaded else ''}"
        runs = [(batch, "full", batch) for batch in sorted({*of.batches, *of.equal_to})]
        runs += [(batch, f"hh={_SHARE}", batch) for batch in of.batches]
        for batch in of.equal_to:  # whose cache is known when the others have run
            runs.append((0, f"hh={_SHARE}", batch))
        for batch, cache, equal_to in runs:
            if batch == 0:
                size = found.get((equal_to, "full"), {}).get("cache GiB", 0) * 2**30
                batch = capacity(model.path, max(1, int(size)), policy=bounded, n_ctx=n_ctx)
                if batch == 0:
                    continue

            def run(
                of: Generation = of, batch: int = batch, cache: str = cache,
                equal_to: int = equal_to, found: dict[tuple[int, str], Cells] = found,
                policy: Policy = bounded,
            ) -> Cells:  # fmt: skip
                cells = generate(model, of, batch, Policy.full() if cache == "full" else policy)
                full = found.get((equal_to, "full"))
                if cache == "full":
                    found[batch, cache] = cells
                elif full is not None:
                    times = cells["tokens/s"] / full["tokens/s"]
                    cells = {**cells, "compared": f"{times:.2f}x full at batch {equal_to}"}
                return cells

            yield {"case": what, "batch": batch, "cache": cache}, run


def generate(model: GpuModel, of: Generation, batch: int, policy: Policy) -> Cells:
    """Tokens/s of prompts and outputs; decoding is computed from some of its steps."""
    plan = model.plan
    # Prompts are read together while weights are in device memory.
    at_once = plan.n_batch if of.is_offloaded else min(2048, plan.n_batch)
    together = max(1, min(batch, at_once // of.prompt))
    texts = Texts(
        model.offloaded if of.is_offloaded else model.model, policy,
        n_ctx=of.prompt + of.generated,
        n_batch=max(together * of.prompt, at_once if together == 1 else 0), n_sequences=batch,
    )  # fmt: skip
    texts.read(1)
    texts.decode(1 if of.is_offloaded else plan.n_warm)
    texts.reset()
    most = model.left((4 if of.is_offloaded else 2) * plan.most_seconds)
    seconds = texts.read(of.prompt, together=together, most=most)
    n = of.generated - 1  # the first comes with the prompt
    n_sample = min(4, plan.n_paper) if of.is_offloaded else plan.n_paper
    medians = []
    for first in firsts(of.prompt, n, n_sample, policy.budget):
        seen = texts.session.tokens_seen(0) - of.prompt
        if first > seen:
            texts.read(first - seen, together=together, most=most)
        medians.append(median(texts.decode(min(n - first, n_sample))))
    texts.check(texts.session.tokens_seen(0))
    decoded = n * fmean(medians)  # the time of a step is linear in the length, or constant
    used = gpu_machine.memory_used(model.device)
    return {
        "seconds": seconds + decoded,
        "prompts, s": seconds,
        "ms per step": 1e3 * decoded / max(1, n),
        "tokens/s": batch * of.generated / (seconds + decoded),
        "cache GiB": texts.session.cache_bytes / 2**30,
        **({} if used is None else {"device GiB": used / 2**30}),
    }


def firsts(prompt: int, n: int, n_sample: int, budget: int | None) -> list[int]:
    """Steps at which samples begin: at the beginning, in the middle and at the end.

    A cache that is full after the prompt is as large in every step, so its first steps suffice.
    """
    if budget is not None and budget <= prompt:
        return [0]
    if n <= 3 * n_sample:
        return list(range(0, n, n_sample))
    return [0, (n - n_sample) // 2, n - n_sample]


def peers(model: GpuModel) -> Iterator[Measurement]:
    """llama.cpp's programs with the same file; `grid` and `prefill` are ours."""
    plan, of = model.plan, model.plan.grid[model.key]
    if model.llama_cpp is None:
        raise ValueError("peers needs --llama-cpp")
    model.release()
    tools = LlamaTools(model.llama_cpp, model.device, model.left(150.0))

    def prompts() -> Cells:
        version, found = tools.prefill(model.path, plan.prompts, min(2, plan.rounds))
        return {"version": version} | {
            f"prefill {n}, tokens/s": [n / one for one in seconds] for n, seconds in found.items()
        }

    def alone() -> Cells:
        found = tools.decode(model.path, of.alone, 2 * plan.n_timed, plan.rounds)
        return {f"after {n}, tokens/s": 1 / step for n, step in found.items()}

    def many() -> Cells:
        found = tools.decode_together(model.path, of.together, plan.batch, 4 * plan.n_timed)
        return {f"after {n}, tokens/s": plan.batch / step for n, step in found.items()}

    yield {"sequences": 1, "engine": "llama.cpp"}, prompts
    yield {"sequences": 1, "engine": "llama.cpp"}, alone
    yield {"sequences": plan.batch, "engine": "llama.cpp"}, many


SECTIONS: dict[str, Callable[[GpuModel], Iterator[Measurement]]] = {
    "grid": grid,
    "prefill": prefill,
    "scores": scores,
    "long": long,
    "paper": paper,
    "peers": peers,
}
