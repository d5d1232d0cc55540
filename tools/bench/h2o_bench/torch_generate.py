"""Generation by Hugging Face transformers, with or without Accelerate's offload to the CPU.

    python -m h2o_bench.torch_generate OPTIONS

OPTIONS is JSON: {"config", "device", "resident": [[prompt, generated, batch], ...],
"offloaded": [the same], "n_sample", "n_offloaded", "n_whole"}. Prints a line of JSON for each:
{"engine", "version", "case", "prefill", "samples": {"first step": [seconds, ...]}, "cache",
"memory"}, or "error" instead of what was measured. Weights are random f16, the cache is a
DynamicCache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import transformers

from h2o_bench.shapes import N_SPECIAL

_torch: Any = torch


def make_model(config: dict[str, Any], device: str) -> Any:
    options = {key: value for key, value in config.items() if key != "model_type"}
    model_config = transformers.AutoConfig.for_model(config["model_type"], **options)
    make: Any = transformers.AutoModelForCausalLM.from_config
    with _torch.device(device):
        return make(model_config, dtype=_torch.float16).eval()


class Runner:
    """A model, on a device or offloaded from it."""

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device
        self._cache: Any = None

    def generate(self, prompt: int, batch: int, parts: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """parts: (first step, number of steps) to measure; the text between them is read."""
        self._cache = transformers.DynamicCache()
        begun = perf_counter()
        ids = self._forward(self._draw(batch, prompt))
        prefill = perf_counter() - begun
        samples = {}
        for first, n in parts:
            if missing := prompt + first - int(self._cache.get_seq_length()):
                ids = self._forward(self._draw(batch, missing))
            times = [perf_counter()]
            for _ in range(n):
                ids = self._forward(ids)
                times.append(perf_counter())
            samples[str(first)] = [end - begin for begin, end in pairwise(times)]
        return {"prefill": prefill, "samples": samples, **self._memory()}

    def release(self) -> None:
        self._cache = None
        if self._device != "cpu":
            _torch.cuda.empty_cache()
            _torch.cuda.reset_peak_memory_stats()

    def _draw(self, batch: int, n: int) -> Any:
        n_vocab = self._model.config.vocab_size
        return _torch.randint(N_SPECIAL, n_vocab, (batch, n), device=self._device)

    def _forward(self, ids: Any) -> Any:
        """A pass; the most likely next tokens, which the host waits for."""
        with _torch.no_grad():
            result = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            following = result.logits[:, -1:].argmax(-1)
        following.tolist()
        return following

    def _memory(self) -> dict[str, int]:
        layers = self._cache.layers
        cached = sum(part.nbytes for layer in layers for part in (layer.keys, layer.values))
        used = 0 if self._device == "cpu" else _torch.cuda.max_memory_allocated()
        return {"cache": cached, "memory": used}


def parts_of(generated: int, n_sample: int, whole: int) -> list[tuple[int, int]]:
    """Samples at the beginning, in the middle and at the end; of short outputs, every step."""
    n = generated - 1
    if n <= whole:
        return [(0, n)]
    return [(first, n_sample) for first in (0, (n - n_sample) // 2, n - n_sample)]


def report(engine: str, version: str, runner: Runner, cases: Sequence[Any], n: int, whole: int,
           only_first: bool) -> None:  # fmt: skip
    for case in cases:
        prompt, generated, batch = case
        parts = [(0, n)] if only_first else parts_of(generated, n, whole)
        try:
            runner.release()
            if not only_first:
                runner.generate(min(prompt, 64), batch, [(0, 2)])  # warm-up
                runner.release()
            found = runner.generate(prompt, batch, parts)
        except _torch.OutOfMemoryError:
            found = {"error": "does not fit in the device's memory"}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"engine": engine, "version": version, "case": case, **found}), flush=True)
    runner.release()


def main() -> int:
    options = json.loads(sys.argv[1])
    _torch.manual_seed(0)
    device = options["device"]
    version = f"{transformers.__version__}, torch {_torch.__version__}"
    model = make_model(options["config"], device)
    runner = Runner(model, device)
    n, whole = options["n_sample"], options["n_whole"]
    report("transformers", version, runner, options["resident"], n, whole, False)
    if options["offloaded"]:
        import accelerate

        model.to("cpu")
        runner.release()
        accelerate.cpu_offload(model, execution_device=_torch.device(device))
        version += f", accelerate {accelerate.__version__}"
        cases = options["offloaded"]
        report("Accelerate offload", version, runner, cases, options["n_offloaded"], 0, True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
