"""Measurements on a GPU: decode, eviction, scores and prefill, with models of real shapes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter

from h2o_bench import gpu_machine
from h2o_bench.baselines import OURS
from h2o_bench.comparison import Baseline, Comparison, Request
from h2o_bench.gpu_plan import Plan
from h2o_bench.gpu_sections import DECODE, EVICTION, MACHINE, PREFILL, SCORES
from h2o_bench.models import Models, config
from h2o_bench.records import Record, Results, ResultsError
from h2o_bench.texts import Texts, TooLongError
from h2o_cpp import __version__, _core
from h2o_cpp.measure.traffic import decode_weight_bytes, kv_bytes, prefill_flops, weights
from h2o_cpp.model.capacity import capacity
from h2o_cpp.model.policy import Policy, budget_policy, named_policy

_BLOCK = 8  # steps of a policy before the next one's turn


@dataclass(frozen=True)
class Bench:
    """State shared by all sections."""

    plan: Plan
    models: Models
    results: Results
    device: str
    progress: Callable[[str], None]
    deadline: float = inf  # of perf_counter(); nothing is begun after it
    begun: float = field(default_factory=perf_counter)
    llama_cpp: Path | None = None  # a directory of its programs
    failures: list[str] = field(default_factory=list, init=False)
    _loaded: dict[tuple[str, str], _core.Model] = field(default_factory=dict, init=False)

    def model(self, shape: str, type_name: str) -> _core.Model:
        """A model on the device, with positions for all measurements; its file is deleted."""
        key = shape, type_name
        if key not in self._loaded:
            path = self.file(shape, type_name)
            self._loaded[key] = self.load(shape, type_name, path)
            path.unlink()
        return self._loaded[key]

    def file(self, shape: str, type_name: str) -> Path:
        """The file of a model."""
        n_positions = self.plan.n_positions
        if config(shape)["model_type"] != "opt":  # whose positions are weights
            n_positions = max(n_positions, self.plan.n_long)
        self.progress(f"{shape} {type_name}: making the file")
        changes = {**self.plan.changes, "max_position_embeddings": n_positions}
        return self.models.gguf(shape, type_name, **changes)

    def load(self, shape: str, type_name: str, path: Path, max_resident: int = 0) -> _core.Model:
        """Load a file; max_resident: bytes of weights on the device, if not all."""
        self.progress(f"{shape} {type_name}: loading {path.stat().st_size / 1e9:.1f} GB")
        begun = perf_counter()
        model = _core.Model(path, device=self.device, threads=0, max_resident=max_resident)
        seconds, version = perf_counter() - begun, f"{__version__} {model.backend}"
        self.record(MACHINE, f"{shape} {type_name}", OURS, "start", seconds, note=version)
        return model

    def release(self) -> None:
        """Free the loaded models that nothing else uses."""
        self._loaded.clear()

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - perf_counter()

    @contextmanager
    def measuring(self, section: int, model: str, engine: str) -> Iterator[None]:
        """Around a measurement: what goes wrong in it is recorded, and the next one begins."""
        try:
            yield
        except ResultsError:
            raise
        except MemoryError as error:
            self.progress(f"{model}; {engine}: {error}")
            self.absent(section, model, engine, "does not fit in the device's memory")
        except TooLongError as error:
            self.absent(section, model, engine, f"not run: {error}")
        except Exception as error:
            traceback.print_exc()
            self.failures.append(model)
            (line, *_) = str(error).splitlines() or [""]
            self.absent(section, model, engine, f"{type(error).__name__}: {line}")

    def has_time(self, section: int, model: str, engine: str, needs: float) -> bool:
        """Whether so many seconds are left; if not, that is recorded."""
        if self.left() >= needs:
            return True
        self.absent(section, model, engine, "not run: no time was left")
        return False

    def absent(self, section: int, model: str, engine: str, reason: str) -> None:
        self.record(section, model, engine, "absent", note=reason)

    def record(
        self, section: int, model: str, engine: str, measure: str, *values: float, note: str = ""
    ) -> None:
        self.results.add(Record(section, model, engine, measure, values, note))

    def record_memory(self, section: int, model: str, engine: str, texts: Texts) -> None:
        """Bytes of the cache, and of all memory in use on a GPU."""
        self.record(section, model, engine, "cache bytes", texts.session.cache_bytes)
        used = gpu_machine.memory_used(self.device)
        if used is not None:
            self.record(section, model, engine, "device bytes", used)


def measure_machine(bench: Bench) -> None:
    """Describe the GPU and measure its limits."""
    name = gpu_machine.describe(bench.device) or bench.device
    plan = bench.plan
    try:
        limits = gpu_machine.gpu_limits(bench.device, plan.copy_bytes, plan.matmul_size)
    except RuntimeError as error:
        bench.record(MACHINE, name, "torch", "absent", note=str(error))
        return
    for measure, value in limits.items():
        bench.record(MACHINE, name, "torch", measure, value)


def measure_decode(bench: Bench) -> None:
    """Decode after a short context; then transformers on the same GPU.

    Every engine is a subprocess; ours have ended before the others start.
    """
    plan = bench.plan
    request = Request(plan.n_decode, plan.context)
    for shape in plan.shapes:
        for type_name in plan.types:
            with Comparison(bench.results, DECODE, shape) as comparison:
                bench.progress(f"{shape} {type_name}: opening")
                _open_ours(bench, comparison, shape, type_name)
                comparison.warm_up()
                comparison.ask([request], plan.rounds)
        for baseline in _baselines(bench, shape):
            with Comparison(bench.results, DECODE, shape) as comparison:
                bench.progress(f"{shape} {baseline.name}: opening")
                comparison.open([baseline])
                comparison.warm_up()
                comparison.ask([request], plan.rounds)


def _baselines(bench: Bench, shape: str) -> Iterable[Baseline]:
    """transformers in f16: as is, and compiled with a static cache."""
    if not bench.plan.baselines:
        return
    sizes = config(shape, **bench.plan.changes)
    options = {"config": sizes, "dtype": "float16", "device": bench.device}
    module = "h2o_bench.engines.transformers"
    n = bench.plan.context + bench.plan.n_decode
    yield Baseline("transformers", module, options)
    yield Baseline("transformers, static cache, compiled", module, {**options, "static": n})


def _open_ours(bench: Bench, comparison: Comparison, shape: str, type_name: str) -> None:
    plan = bench.plan
    path = bench.models.gguf(shape, type_name, **plan.changes)
    options = {
        "path": str(path),
        "device": bench.device,
        "n_ctx": plan.context + plan.n_decode + 1,
        "greedy": True,
    }
    name = f"{OURS} {type_name}"
    comparison.open([Baseline(name, "h2o_bench.engines.h2o", options)])
    sizes = config(shape, **plan.changes)
    n_heads = sizes["num_attention_heads"]
    head_dim = sizes["hidden_size"] // n_heads
    n_kv_heads = sizes.get("num_key_value_heads") or n_heads
    per_token = kv_bytes(n_kv_heads, head_dim, "f16")
    n_seen = plan.context + (plan.n_decode + 1) / 2
    cached = n_seen * sizes["num_hidden_layers"] * per_token
    tensors = weights(_core.GgufShards(path).files)
    comparison.record(name, "bytes per token", decode_weight_bytes(tensors) + cached)
    path.unlink()


def measure_eviction(bench: Bench) -> None:
    """H2O against the full cache, by batch size."""
    plan = bench.plan
    model = bench.model(plan.shape, "F16")
    n_ctx = plan.prompt + plan.n_generate
    bounded = budget_policy(plan.share, None, n_ctx)
    policies = {"full": Policy.full(), f"hh={plan.share}": bounded}
    Texts(model, bounded, n_ctx=n_ctx, n_batch=plan.prompt).read(plan.prompt)  # warm-up
    full_bytes = 0
    for batch in plan.batches:
        for name, policy in policies.items():
            cache_bytes = _generate(bench, model, name, policy, batch)
            if batch == plan.equal_to and policy is not bounded:
                full_bytes = cache_bytes
    if full_bytes:
        batch = capacity(model, full_bytes, policy=bounded, n_ctx=n_ctx)
        _generate(bench, model, f"hh={plan.share}", bounded, batch)
        label = f"{plan.shape}, batch {batch}"
        bench.record(EVICTION, label, f"hh={plan.share}", "equal to", plan.equal_to)


def _generate(bench: Bench, model: _core.Model, name: str, policy: Policy, batch: int) -> int:
    """Read prompts and generate; returns the cache's bytes, 0 if it does not fit."""
    plan = bench.plan
    label = f"{plan.shape}, batch {batch}"
    n = plan.n_generate - 1  # the first comes with the prompt
    record = partial(bench.record, EVICTION, label, name)
    try:
        texts = Texts(
            model,
            policy,
            n_ctx=plan.prompt + plan.n_generate,
            n_batch=plan.prompt,
            n_sequences=batch,
        )
    except MemoryError as error:
        record("absent", note=str(error))
        return 0
    texts.read(8)  # warm-up
    texts.decode(4)
    texts.reset()
    record("prefill seconds", texts.read(plan.prompt))
    firsts = (0, (n - plan.n_sample) // 2, n - plan.n_sample)
    if batch in plan.whole:
        seconds = texts.decode(n)
        record("decode seconds", sum(seconds))
        samples = {first: seconds[first : first + plan.n_sample] for first in firsts}
    else:
        samples = {
            first: _decode_after(texts, plan.prompt + first, plan.n_sample) for first in firsts
        }
    for first, seconds in samples.items():
        record(f"step seconds at {plan.prompt + first}", *seconds)
    # Step time is linear in the length, so the mean of the three is that of all steps.
    mean = sum(map(sum, samples.values())) / len(samples) / plan.n_sample
    record("decode seconds, extrapolated", n * mean)
    texts.check(plan.prompt + n)
    record("prompt", plan.prompt)
    record("tokens", plan.n_generate)
    bench.record_memory(EVICTION, label, name, texts)
    return texts.session.cache_bytes


def _decode_after(texts: Texts, n_tokens: int, n: int) -> list[float]:
    """Seconds of n steps after this many tokens; missing ones are read first."""
    if missing := n_tokens - texts.session.tokens_seen(0):
        texts.read(missing)
    return texts.decode(n)


def measure_scores(bench: Bench) -> None:
    """The cost of scores and eviction per step, against a window with as many slots."""
    plan = bench.plan
    model = bench.model(plan.shape, "F16")
    per_slot = model.n_layers * kv_bytes(model.n_kv_heads, model.head_dim, "f16")
    for batch in plan.slots_batches:
        for slots in plan.slots:
            label = f"{plan.shape}, batch {batch}, {slots} slots"
            n_read = slots + 16
            everyone = {
                name: Texts(
                    model,
                    named_policy(name, slots),
                    n_ctx=n_read + _BLOCK + plan.n_steps + 1,
                    n_batch=plan.prompt,
                    n_sequences=batch,
                )
                for name in ("window", "h2o")
            }
            seconds: dict[str, list[float]] = {name: [] for name in everyone}
            for texts in everyone.values():
                texts.read(n_read)
                texts.decode(_BLOCK)
            for _ in range(plan.n_steps // _BLOCK):
                for name, texts in everyone.items():
                    seconds[name] += texts.decode(_BLOCK)
            for name, texts in everyone.items():
                texts.check(n_read + _BLOCK + len(seconds[name]))
                bench.record(SCORES, label, name, "step seconds", *seconds[name])
                bench.record(SCORES, label, name, "bytes", batch * (slots + 1) * per_slot)


def measure_prefill(bench: Bench) -> None:
    """Prefill in one chunk, with or without scores for what is kept."""
    plan = bench.plan
    for shape, type_name in plan.models:
        model = bench.model(shape, type_name)
        for n in plan.prompts:
            label = f"{shape} {type_name}, {n} tokens"
            prefill(bench, model, label, n, ("window", "h2o"))


def prefill(bench: Bench, model: _core.Model, label: str, n: int, bounded: Sequence[str]) -> None:
    """Read n tokens, keeping all, or a share with each of the policies `bounded`."""
    plan = bench.plan
    policies = {"full": Policy.full()} | {
        name: named_policy(name, int(plan.share * n)) for name in bounded
    }
    everyone = {
        name: Texts(model, policy, n_ctx=n + 1, n_batch=n) for name, policy in policies.items()
    }
    for i in range(-1, plan.rounds):  # the first is a warm-up
        for name, texts in everyone.items():
            texts.reset()
            seconds = texts.read(n)
            if i >= 0:
                bench.record(PREFILL, label, name, "seconds", seconds)
    for texts in everyone.values():
        texts.check(n)
    # Causal attention: half of n x n products, for K and for V.
    attention = 2 * n * (n + 1) * model.n_layers * model.n_heads * model.head_dim
    flops = n * prefill_flops(weights([model.file])) + attention
    bench.record(PREFILL, label, OURS, "flops", flops)


SECTIONS: dict[int, Callable[[Bench], None]] = {
    MACHINE: measure_machine,
    DECODE: measure_decode,
    EVICTION: measure_eviction,
    SCORES: measure_scores,
    PREFILL: measure_prefill,
}
