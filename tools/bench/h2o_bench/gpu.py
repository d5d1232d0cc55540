"""Measurements on a GPU with models of real shapes: its limits, scores and prefill."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import perf_counter

from h2o_bench import gpu_machine
from h2o_bench.engine_names import OURS
from h2o_bench.gpu_plan import Plan
from h2o_bench.gpu_sections import MACHINE, PREFILL, SCORES
from h2o_bench.models import Models, config
from h2o_bench.records import Record, Results, ResultsError
from h2o_bench.texts import Texts, TooLongError
from h2o_cpp import __version__, _core
from h2o_cpp.measure.traffic import kv_bytes, prefill_flops, weights
from h2o_cpp.model.policy import Policy, fraction_of, named_policy

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
                    n_batch=min(plan.n_batch, n_read),
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


def measure_prefill(bench: Bench, model: _core.Model, label: str, n: int) -> None:
    """Read n tokens, keeping all or a share."""
    plan = bench.plan
    policies = {"full": Policy.full(), "h2o": named_policy("h2o", fraction_of(n, plan.share))}
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
