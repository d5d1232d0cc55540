"""Throughput in equal memory, by every engine: docs/throughput.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from h2o_bench.baselines import ours
from h2o_bench.comparison import Baseline
from h2o_bench.engine_names import OURS
from h2o_bench.engine_process import EngineError, EngineProcess
from h2o_bench.models import Models, config
from h2o_bench.records import Record, Results
from h2o_bench.texts import Texts
from h2o_cpp import _core, capacity
from h2o_cpp.measure.planner import sizes_of
from h2o_cpp.measure.prediction import placements
from h2o_cpp.measure.traffic import weights
from h2o_cpp.model.cache_memory import ModelShape
from h2o_cpp.model.policy import Policy, budget_policy
from h2o_cpp.model.session import open_model

TABLE, OFFLOAD, SEQUENCES, ARRIVALS = range(20, 24)  # sections of the results
SHARE = 0.2  # kept fraction of the context
_ENGINES = "h2o_bench.engines"
_BLOCK = 32  # OpenVINO's block size in tokens
_PAD = 256  # llama.cpp's sequences have a multiple of this many tokens


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    # Shapes, and the number of full caches of the longest text that memory holds.
    shapes: Sequence[str] = ("OPT-125M", "SmolLM2-135M")
    full_caches: float = 3.0
    prompt: int = 512
    lengths: Sequence[int] = (32, 512, 1024)
    offload_share: float = 0.6  # memory of the offload table, as a fraction of the weights
    offload_lengths: Sequence[int] = (32, 512)
    counts: Sequence[int] = (1, 2, 4, 8, 16, 24)  # sequences
    steps: int = 16  # decoded for each count
    requests: int = 48  # number of arrivals
    load: float = 0.7  # arrival rate, as a fraction of the engine's throughput
    rounds: int = 1
    most_seconds: float = 300.0  # time limit per cell


QUICK = Plan(
    shapes=("OPT-125M", "SmolLM2-135M"),
    full_caches=2.0,
    prompt=64,
    lengths=(4, 8),
    offload_lengths=(2,),
    counts=(1, 2),
    steps=4,
    requests=6,
)


@dataclass(frozen=True)
class Bench:
    """State shared by all parts."""

    plan: Plan
    models: Models
    results: Results
    threads: int
    memory: int | None = None  # bytes; default: from the plan


@dataclass(frozen=True)
class Entry:
    """An engine and its use of the memory; 0 sequences if none fits."""

    baseline: Baseline
    weight_bytes: int
    text_bytes: float  # cache per sequence

    def sequences(self, memory: int) -> int:
        """The number of sequences whose caches fit besides the weights."""
        return max(0, int((memory - self.weight_bytes) // self.text_bytes))


def memory_of(bench: Bench, path: Path, whole: ModelShape) -> int:
    """Bytes for weights and caches: given, or the plan's number of full caches."""
    if bench.memory is not None:
        return bench.memory
    longest = bench.plan.prompt + max(bench.plan.lengths)
    return int(path.stat().st_size + bench.plan.full_caches * 2 * _kv_values(whole) * longest)


def measure_table(bench: Bench) -> None:
    """Section 20: prompts and output lengths, in equal memory."""
    plan = bench.plan
    for shape in plan.shapes:
        path = bench.models.gguf(shape, "F16")
        whole = ModelShape.of_file(path)
        memory = memory_of(bench, path, whole)
        for n in plan.lengths:
            case = _case(shape, plan.prompt, n)
            _note(bench, TABLE, case, "memory", memory)
            for _ in range(plan.rounds):
                for entry in _entries(bench, shape, path, whole, n, memory):
                    if isinstance(entry, Entry):
                        _run(bench, TABLE, case, entry, memory, n)
                    else:
                        bench.results.add(Record(TABLE, case, entry[0], "absent", note=entry[1]))


def measure_offload(bench: Bench) -> None:
    """Section 21: with memory for a part of the weights."""
    plan, shape = bench.plan, bench.plan.shapes[0]
    path = bench.models.gguf(shape, "F16")
    whole = ModelShape.of_file(path)
    model = _core.GgufShards(path)
    sizes = sizes_of(model, _core.Config(model))
    resident = min(n_bytes for _, n_bytes in placements(sizes))
    values = _kv_values(whole)
    memory = int(plan.offload_share * path.stat().st_size)
    for n in plan.offload_lengths:
        case = _case(shape, plan.prompt, n)
        n_ctx = plan.prompt + n
        _note(bench, OFFLOAD, case, "memory", memory)
        for _ in range(plan.rounds):
            for name, hh in ((f"{OURS}, full", None), (f"{OURS}, hh={SHARE}", SHARE)):
                entry = Entry(
                    ours(path, bench.threads, name=name, n_ctx=n_ctx, hh=hh, max_resident=resident),
                    resident,
                    _slab(path, n_ctx, hh),
                )
                _run(bench, OFFLOAD, case, entry, memory, n)
            with TemporaryDirectory() as directory:
                options = {
                    **{"config": config(shape), "threads": bench.threads},
                    **{"dtype": "bfloat16", "offload": directory},
                }
                name = "transformers bfloat16, Accelerate disk offload"
                # The largest module, the embedding, is in memory.
                baseline = Baseline(name, f"{_ENGINES}.transformers", options)
                _run(
                    bench,
                    OFFLOAD,
                    case,
                    Entry(baseline, sizes.others, values * 2 * n_ctx),
                    memory,
                    n,
                )


def measure_sequences(bench: Bench) -> None:
    """Section 22: tokens per second of all sequences against their number."""
    plan, shape = bench.plan, bench.plan.shapes[0]
    path = bench.models.gguf(shape, "F16")
    model = open_model(path, device="cpu", threads=bench.threads)
    n_ctx = plan.prompt + max(plan.lengths)
    memory = memory_of(bench, path, ModelShape.of(model))
    room = max(1, memory - path.stat().st_size)
    # In the middle of a long text; two steps are a warm-up.
    context = min(plan.prompt + max(plan.lengths) // 2, n_ctx - plan.steps - 2)
    case = f"{shape}, after {context} tokens"
    policies = {
        f"{OURS}, full": Policy.full(),
        f"{OURS}, hh={SHARE}": budget_policy(SHARE, None, n_ctx),
    }
    _note(bench, SEQUENCES, case, "memory", memory)
    _note(bench, SEQUENCES, case, "context", n_ctx)
    for name, policy in policies.items():
        fits = capacity(path, room, policy=policy, n_ctx=n_ctx)
        bench.results.add(Record(SEQUENCES, case, name, "fit", (float(fits),)))
    for k in plan.counts:
        for name, policy in policies.items():  # in turns
            texts = Texts(model, policy, n_ctx=n_ctx, n_batch=512, n_sequences=k)
            texts.read(context)
            texts.decode(2)
            rate = k / median(texts.decode(plan.steps))
            bench.results.add(Record(SEQUENCES, case, name, f"{k}", (rate,)))
            bytes_of_caches = float(texts.session.cache_bytes)
            bench.results.add(Record(SEQUENCES, case, name, f"{k} bytes", (bytes_of_caches,)))
            del texts


def _entries(
    bench: Bench, shape: str, path: Path, whole: ModelShape, n: int, memory: int
) -> Iterator[Entry | tuple[str, str]]:
    """The engines for a shape; (name, reason) if a model cannot be made.

    A sequence's bytes are those of K and V of all its tokens, in the engine's type.
    """
    threads, sizes = bench.threads, config(shape)
    n_ctx = bench.plan.prompt + n
    values = _kv_values(whole)
    f16 = path.stat().st_size
    for name, hh in ((f"{OURS}, full", None), (f"{OURS}, hh={SHARE}", SHARE)):
        one = ours(path, threads, name=name, n_ctx=n_ctx, hh=hh)
        yield Entry(one, f16, _slab(path, n_ctx, hh))
    if sizes["model_type"] != "opt":
        options: dict[str, Any] = {"path": str(path), "threads": threads, "n_ctx": 64}
        one = Baseline("llama.cpp", f"{_ENGINES}.llama_cpp", options)
        yield Entry(one, f16, values * 2 * -(-n_ctx // _PAD) * _PAD)
    if sizes["model_type"] == "llama":
        yield from _openvino(bench, path, whole, n, sizes["vocab_size"], f16, memory)
    n_weights = _n_weights(path)
    for dtype, n_bytes in (("bfloat16", 2), ("float32", 4)):
        options = {"config": sizes, "threads": threads, "dtype": dtype}
        one = Baseline(f"transformers {dtype}", f"{_ENGINES}.transformers", options)
        yield Entry(one, n_bytes * n_weights, n_bytes * values * n_ctx)
    if sizes["model_type"] == "opt":
        for type_name, n_bytes in (("int8", 1), ("float32", 4)):
            name = f"CTranslate2 {type_name}"
            entry = Entry(
                Baseline(name, f"{_ENGINES}.ctranslate2", {}),
                n_bytes * n_weights,
                4 * values * n_ctx,  # the cache is f32 in both cases
            )
            if not entry.sequences(memory):
                yield entry
                continue
            try:
                directory = str(bench.models.ctranslate2(shape, type_name))
            except EngineError as error:
                yield name, str(error)
                continue
            options = {"path": directory, "threads": threads, "n_vocab": sizes["vocab_size"]}
            one = entry.baseline._replace(options=options)
            yield Entry(one, entry.weight_bytes, entry.text_bytes)


def _openvino(
    bench: Bench, path: Path, whole: ModelShape, n: int, n_vocab: int, f16: int, memory: int
) -> Iterator[Entry]:
    """With the full cache, by default in u8 with two f32 per head and token, and with 20%.

    With eviction, a sequence needs its whole prompt temporarily, but prompts are read one by one.
    """
    n_ctx = bench.plan.prompt + n
    token_bytes = 2 * whole.n_layers * whole.n_kv_heads * (whole.head_dim + 8)
    options = {"path": str(path), "threads": bench.threads, "n_vocab": n_vocab}
    module = f"{_ENGINES}.openvino"
    pool = int((memory - f16) // token_bytes) // _BLOCK * _BLOCK
    one = Baseline("OpenVINO GenAI", module, {**options, "pool_tokens": pool})
    yield Entry(one, f16, token_bytes * -(-n_ctx // _BLOCK) * _BLOCK)
    kept = max(3 * _BLOCK, int(SHARE * n_ctx) // _BLOCK * _BLOCK)
    evicting = {**options, "cache_tokens": kept, "pool_tokens": pool}
    one = Baseline(f"OpenVINO GenAI, {SHARE:.0%} kept", module, evicting)
    prompt_bytes = token_bytes * bench.plan.prompt
    yield Entry(one, f16 + prompt_bytes, token_bytes * (kept + _BLOCK))


def _run(bench: Bench, section: int, case: str, entry: Entry, memory: int, n: int) -> None:
    """A cell: a subprocess that loads the model, warms up and generates."""
    name, module, options = entry.baseline
    k = entry.sequences(memory)

    def add(measure: str, value: float, note: str = "") -> None:
        bench.results.add(Record(section, case, name, measure, (value,), note))

    if not k:
        needed = (entry.weight_bytes + entry.text_bytes) / 2**20
        reason = f"weights and one sequence take {needed:.0f} MiB"
        bench.results.add(Record(section, case, name, "absent", note=reason))
        return
    if module.endswith("h2o"):
        options = {**options, "n_sequences": k}
    try:
        with EngineProcess(module, options, timeout=bench.plan.most_seconds) as engine:
            engine.batch(1, 16, 2)
            add("before", engine.batch(1, 16, 2).peak_rss_bytes)
            answer = engine.batch(k, bench.plan.prompt, n)
            add("sequences", k, str(engine.description["version"]))
            add("tokens/s", k * n / answer.seconds[0])
            add("seconds", answer.seconds[0])
            add("computed bytes", entry.weight_bytes + k * entry.text_bytes)
            add("rss", answer.peak_rss_bytes)
    except EngineError as error:
        bench.results.add(Record(section, case, name, "absent", note=str(error)))


def _note(bench: Bench, section: int, case: str, measure: str, value: float) -> None:
    bench.results.add(Record(section, case, "", measure, (float(value),)))


def _case(shape: str, prompt: int, n: int) -> str:
    return f"{shape}, {prompt} + {n}"


def _slab(path: Path, n_ctx: int, hh: float | None) -> float:
    """A sequence's cache in bytes, as in capacity()."""
    many = 2**50
    return many / capacity(path, many, hh=hh, n_ctx=n_ctx)


def _kv_values(whole: ModelShape) -> int:
    """Values per token of a full cache."""
    return 2 * whole.n_layers * whole.n_kv_heads * whole.head_dim


def _n_weights(path: Path) -> int:
    return sum(prod(weight.shape) for weight in weights(_core.GgufShards(path).files))
