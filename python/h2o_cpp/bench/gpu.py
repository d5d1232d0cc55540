"""What is measured on a GPU: decode, eviction, scores and prefill, on models of real shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from h2o_cpp import _core
from h2o_cpp.bench import gpu_machine
from h2o_cpp.bench.comparison import Comparison, Contestant, Request
from h2o_cpp.bench.contestants import OURS
from h2o_cpp.bench.gpu_report import DECODE, EVICTION, MACHINE, PREFILL, SCORES
from h2o_cpp.bench.models import Models, config
from h2o_cpp.bench.records import Record, Results
from h2o_cpp.bench.texts import Texts
from h2o_cpp.bench.traffic import decode_weight_bytes, kv_bytes, prefill_flops, weights
from h2o_cpp.capacity import capacity
from h2o_cpp.policy import Policy, budget_policy, named_policy

_BLOCK = 8  # steps of one policy before it is the other's turn


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    copy_bytes: int = 1 << 32
    matmul_size: int = 8192
    changes: Mapping[str, int] = field(default_factory=dict)  # to every config
    rounds: int = 3
    # Decode
    shapes: Sequence[str] = ("OPT-6.7B", "LLaMA-7B", "LLaMA-3-8B")
    types: Sequence[str] = ("F16", "Q8_0", "Q4_K_M")
    peers: bool = True
    context: int = 128
    n_decode: int = 128
    # Eviction and scores, in F16
    shape: str = "OPT-6.7B"
    prompt: int = 2048
    n_generate: int = 2048
    share: float = 0.2
    batches: Sequence[int] = (1, 8, 24, 64)
    equal_to: int = 24  # the batch whose full cache's memory is filled with bounded ones
    whole: Sequence[int] = (24,)  # batches whose every step is measured
    n_sample: int = 64  # steps at the beginning, the middle and the end, of the others
    slots: Sequence[int] = (128, 819, 4096)
    slots_batches: Sequence[int] = (1, 8)
    n_steps: int = 160
    # Prefill
    models: Sequence[tuple[str, str]] = (
        ("OPT-6.7B", "F16"),
        ("LLaMA-3-8B", "F16"),
        ("LLaMA-3-8B", "Q4_K_M"),
    )
    prompts: Sequence[int] = (2048, 8192)

    @property
    def n_positions(self) -> int:
        """That models must have, trained or not."""
        longest = self.prompt + self.n_generate, max(self.slots) + 2 * self.n_steps
        return max(*longest, *self.prompts) + 64


# To see that everything works, on any machine.
QUICK = Plan(
    copy_bytes=1 << 24,
    matmul_size=256,
    changes={"num_hidden_layers": 2},
    rounds=2,
    shapes=("OPT-1.3B", "SmolLM2-135M"),
    types=("F16", "Q4_K_M"),
    context=16,
    n_decode=8,
    shape="OPT-1.3B",
    prompt=48,
    n_generate=32,
    batches=(1, 3),
    equal_to=3,
    whole=(3,),
    n_sample=4,
    slots=(16, 64),
    slots_batches=(1, 2),
    n_steps=24,
    models=(("SmolLM2-135M", "F16"),),
    prompts=(64, 128),
)


@dataclass(frozen=True)
class Bench:
    """What every section needs."""

    plan: Plan
    models: Models
    results: Results
    device: str
    progress: Callable[[str], None]
    _loaded: dict[tuple[str, str], _core.Model] = field(default_factory=dict)

    def model(self, shape: str, type_name: str) -> _core.Model:
        """On the device, with positions for everything that is measured; its file is gone."""
        key = shape, type_name
        if key not in self._loaded:
            self.progress(f"{shape} {type_name}: making the file")
            changes = {**self.plan.changes, "max_position_embeddings": self.plan.n_positions}
            path = self.models.gguf(shape, type_name, **changes)
            self.progress(f"{shape} {type_name}: loading {path.stat().st_size / 1e9:.1f} GB")
            self._loaded[key] = _core.Model(path, device=self.device, threads=0)
            path.unlink()
        return self._loaded[key]

    def record(
        self, section: int, model: str, engine: str, measure: str, *values: float, note: str = ""
    ) -> None:
        """Keep it, and say so."""
        self.results.add(Record(section, model, engine, measure, values, note))
        shown = ", ".join(f"{value:.6g}" for value in values[:3]) + ", ..." * (len(values) > 3)
        self.progress(f"{model}; {engine}; {measure}: {shown or note}")


def measure_machine(bench: Bench) -> None:
    """What the GPU is, and its limits."""
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
    """One token at a time after a short context, beside transformers on the same GPU.

    Every engine is a process; those of one shape take turns.
    """
    plan = bench.plan
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        comparisons = {
            shape: stack.enter_context(Comparison(bench.results, DECODE, shape))
            for shape in plan.shapes
        }
        # All at once, because compiling takes long, and on the CPU.
        bench.progress("opening transformers")
        peers = [(shape, peer) for shape in plan.shapes for peer in _peers(bench, shape)]
        list(pool.map(lambda pair: comparisons[pair[0]].open([pair[1]]), peers))
        for shape, comparison in comparisons.items():
            with comparison:
                bench.progress(f"{shape}: opening")
                list(pool.map(partial(_open_ours, bench, comparison, shape), plan.types))
                comparison.warm_up()
                bench.progress(f"{shape}: decoding")
                comparison.ask([Request(plan.n_decode, plan.context)], plan.rounds)


def _peers(bench: Bench, shape: str) -> Iterable[Contestant]:
    """transformers in f16: as it comes, and compiled with a cache of fixed size."""
    if not bench.plan.peers:
        return
    sizes = config(shape, **bench.plan.changes)
    options = {"config": sizes, "dtype": "float16", "device": bench.device}
    module = "h2o_cpp.peers.engines.transformers"
    n = bench.plan.context + bench.plan.n_decode
    yield Contestant("transformers", module, options)
    yield Contestant("transformers, static cache, compiled", module, {**options, "static": n})


def _open_ours(bench: Bench, comparison: Comparison, shape: str, type_name: str) -> None:
    plan = bench.plan
    path = bench.models.gguf(shape, type_name, **plan.changes)
    options = {"path": str(path), "device": bench.device, "n_ctx": plan.context + plan.n_decode}
    name = f"{OURS} {type_name}"
    comparison.open([Contestant(name, "h2o_cpp.peers.engines.h2o", options)])
    sizes = config(shape, **plan.changes)
    n_heads = sizes["num_attention_heads"]
    head_dim = sizes["hidden_size"] // n_heads
    n_kv_heads = sizes.get("num_key_value_heads") or n_heads
    per_token = kv_bytes(n_kv_heads, head_dim, "f16")
    n_seen = plan.context + (plan.n_decode + 1) / 2
    cached = n_seen * sizes["num_hidden_layers"] * per_token
    tensors = weights(_core.GgufModel(path).files)
    comparison.record(name, "bytes per token", decode_weight_bytes(tensors) + cached)
    path.unlink()


def measure_eviction(bench: Bench) -> None:
    """The heavy-hitter cache against the full one, by how many texts are generated together."""
    plan = bench.plan
    model = bench.model(plan.shape, "F16")
    n_ctx = plan.prompt + plan.n_generate
    bounded = budget_policy(plan.share, None, n_ctx)
    policies = {"full": Policy.full(), f"hh={plan.share}": bounded}
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
    """Prompts, then tokens; the bytes of the cache, 0 if it does not fit."""
    plan = bench.plan
    label = f"{plan.shape}, batch {batch}"
    n = plan.n_generate - 1  # the first comes with the prompt
    try:
        texts = Texts(
            model,
            policy,
            n_ctx=plan.prompt + plan.n_generate,
            n_batch=plan.prompt,
            n_sequences=batch,
        )
    except MemoryError as error:
        bench.record(EVICTION, label, name, "absent", note=str(error))
        return 0
    texts.read(8)
    texts.decode(4)
    texts.reset()
    bench.record(EVICTION, label, name, "prefill seconds", texts.read(plan.prompt))
    if batch in plan.whole:
        seconds = texts.decode(n)
        bench.record(EVICTION, label, name, "decode seconds", sum(seconds))
    else:
        # Steps take longer as the text does, in proportion: the mean of three is that of all.
        means = []
        for first in (0, (n - plan.n_sample) // 2, n - plan.n_sample):
            length = plan.prompt + first
            if missing := length - texts.session.tokens_seen(0):
                texts.read(missing)
            seconds = texts.decode(plan.n_sample)
            bench.record(EVICTION, label, name, f"step seconds at {length}", *seconds)
            means.append(sum(seconds) / plan.n_sample)
        bench.record(EVICTION, label, name, "decode seconds, extrapolated", n * sum(means) / 3)
    texts.check(plan.prompt + n)
    bench.record(EVICTION, label, name, "prompt", plan.prompt)
    bench.record(EVICTION, label, name, "tokens", plan.n_generate)
    bench.record(EVICTION, label, name, "cache bytes", texts.session.cache_bytes)
    used = gpu_machine.memory_used(bench.device)
    if used is not None:
        bench.record(EVICTION, label, name, "device bytes", used)
    return texts.session.cache_bytes


def measure_scores(bench: Bench) -> None:
    """What scores and eviction by them cost a step, against a window of as many slots."""
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
    """Prompts in one piece, with what is kept of them chosen by scores or without."""
    plan = bench.plan
    for shape, type_name in plan.models:
        model = bench.model(shape, type_name)
        for n in plan.prompts:
            label = f"{shape} {type_name}, {n} tokens"
            budget = int(plan.share * n)
            policies = {"full": Policy.full()} | {
                name: named_policy(name, budget) for name in ("window", "h2o")
            }
            everyone = {
                name: Texts(model, policy, n_ctx=n + 1, n_batch=n)
                for name, policy in policies.items()
            }
            for i in range(-1, plan.rounds):  # the first warms up
                for name, texts in everyone.items():
                    texts.reset()
                    seconds = texts.read(n)
                    if i >= 0:
                        bench.record(PREFILL, label, name, "seconds", seconds)
            for texts in everyone.values():
                texts.check(n)
            # A query attends to itself and to those before: half of n x n products, of K and of V.
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
