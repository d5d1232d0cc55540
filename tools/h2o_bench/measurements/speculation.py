"""Draft models and layers for multi-token prediction, compared with what their guesses allow.

A model of a real shape has random weights. The outputs of all layers but the first are scaled: the
smaller, the more often the first layers alone, which are the draft model, and a copy of the first
layer, which predicts, guess what the whole model generates. The runs take turns with those without
drafts, and their outputs must be equal.

The gain that so many right guesses per pass allow follows from the times of a step that verifies
the guesses and of as many steps of the draft, in durations of a step without: measured beside it,
with as many tokens in the caches. The formula of arXiv 2211.17192, with the best number of guesses,
takes verification as free, and each guess as right with the same probability.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from h2o_bench.models import scale_q8_0
from h2o_bench.results import Row
from h2o_cpp import Generator, _core
from h2o_cpp.cli.argument_types import fractions
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.model.session import open_model
from h2o_cpp.options import CacheOptions
from support.changed_gguf import changed
from support.shapes import SHAPES, config
from support.synthetic import write_model

_ARCHITECTURE = "glm4moe"  # has layers for multi-token prediction, and may have no experts
_SLOTS = 512  # of the draft's cache
_CHUNK = 32  # tokens per step of prefill
_WARM = 12  # tokens of the first, untimed output
_STEPS = 8  # timed steps; the median counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="TinyLlama-1.1B", metavar="SHAPE")
    parser.add_argument("--layers", type=int, help="of the model (default: the shape's)")
    parser.add_argument("--draft-layers", type=int, default=2, help="of the draft model")
    parser.add_argument("--drafts", nargs="+", choices=["model", "mtp"], default=["model", "mtp"])
    parser.add_argument("--most", type=int, nargs="+", default=[2, 4, 16], metavar="N")
    parser.add_argument("--scales", type=fractions, default=[0.01, 0.04], metavar="X,...")
    parser.add_argument("--hh", type=float, default=0.2)
    parser.add_argument("--n-ctx", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=448, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", type=Path, metavar="DIRECTORY", help="of models, kept there")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        for scale in args.scales:
            yield from _measure(_models(args.models or Path(directory), args, scale), scale, args)


def _measure(paths: dict[str, Path], scale: float, args: argparse.Namespace) -> Iterator[Row]:
    common: Any = {"hh": args.hh, "n_ctx": args.n_ctx, "threads": args.threads, "max_sequences": 1}
    common["prefix_cache"] = 0
    plain = Generator(paths["model"], **common)
    drafted = {
        (kind, most): Generator(
            paths["model"], **common, draft_max=most,
            draft="mtp" if kind == "mtp" else paths["draft"],
        )
        for kind in args.drafts
        for most in args.most
    }  # fmt: skip
    costs = _Costs(paths, args)
    samples: dict[tuple[str, int], dict[str, list[float]]] = {key: {} for key in drafted}
    for seed in range(-1, args.rounds):
        prompt = np.random.default_rng(seed + 1).integers(4, costs.n_vocab, args.prompt).tolist()
        n_tokens = args.tokens if seed >= 0 else _WARM
        options: Any = {"max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
        expected = plain.generate(prompt, **options)
        for (kind, most), generator in drafted.items():
            found = generator.generate(prompt, **options)
            if found.text != expected.text:
                raise RuntimeError(f"the output with {kind} differs: {found.text!r}")
            if seed < 0:  # the first steps after loading
                continue
            n_passes = n_tokens - 1 - found.accepted_tokens
            cells = costs.compare(
                kind, most, found.drafted_tokens / n_passes, found.accepted_tokens / n_passes,
                expected.decode_seconds / found.decode_seconds,
            )  # fmt: skip
            cells = {"tokens/s without": (n_tokens - 1) / expected.decode_seconds, **cells}
            for name, cell in cells.items():
                samples[kind, most].setdefault(name, []).append(cell)
    for (kind, most), row in samples.items():
        yield {"scale": scale, "draft": kind, "most": most, **row}


def _rate(n_right: float, n_drafts: float) -> float:
    """The probability of each guess to be right, if that many of so many in succession are."""
    low, high = 0.0, 1 - 1e-6
    for _ in range(50):
        a = (low + high) / 2
        low, high = (a, high) if a * (1 - a**n_drafts) / (1 - a) < n_right else (low, a)
    return low


class _Costs:
    """The times of steps, of sessions as a generator with drafts has them."""

    def __init__(self, paths: dict[str, Path], args: argparse.Namespace) -> None:
        file = ModelFile.find(paths["model"])
        self.n_vocab = file.config.n_vocab
        self._n_embd = file.metadata[f"{_ARCHITECTURE}.embedding_length"]
        self._random = np.random.default_rng(0)
        model = open_model(file, device="cpu", threads=args.threads)
        self._model = _session(model, file, args.hh, args)
        self._drafts = {"mtp": _session(_core.next_token_predictor(model), file, _SLOTS, args)}
        draft = ModelFile.find(paths["draft"])
        model = open_model(draft, device="cpu", threads=args.threads)
        self._drafts["model"] = _session(model, draft, _SLOTS, args)
        for session in (self._model, *self._drafts.values()):
            for _ in range(args.prompt // _CHUNK):
                self._read(session, _CHUNK)

    def compare(
        self, kind: str, most: int, n_drafts: float, n_right: float, gain: float
    ) -> dict[str, float]:
        """The gain beside what so many guesses per pass, and right ones, allow at most."""
        sizes = sorted({0, int(n_drafts), min(int(n_drafts) + 1, most)})
        times: dict[int, list[float]] = {n: [] for n in sizes}
        drafting = []
        for _ in range(_STEPS):  # in turns
            for n in sizes:
                times[n].append(self._read(self._model, 1 + n, n))
            drafting += [self._read(self._drafts[kind], 1) for _ in range(max(1, round(n_drafts)))]
        step = median(times[0])
        draft = median(drafting) / step
        verify = float(np.interp(n_drafts, sizes, [median(times[n]) for n in sizes])) / step
        rate = _rate(n_right, n_drafts)
        allowed = (1 + n_right) / (verify + n_drafts * draft)
        formula = max(
            (1 - rate ** (n + 1)) / (1 - rate) / (n * draft + 1) for n in range(1, most + 1)
        )
        return {
            "guesses per pass": n_drafts,
            "each right": rate,
            "time of a guess": draft,
            "of a pass": verify,
            "gain": gain,
            "allowed": allowed,
            "gain/allowed": gain / allowed,
            "formula": formula,
            "gain/formula": gain / formula,
        }

    def _read(self, session: _core.Session, n: int, n_drafts: int = 0) -> float:
        """The seconds of a step with n tokens; drafts are retracted after it."""
        tokens = self._random.integers(4, self.n_vocab, n).astype(np.int32)
        if session is self._drafts["mtp"]:
            session.set_hidden(np.ones((n, self._n_embd), np.float32))
        started = time.perf_counter()
        session.greedy([(0, tokens)], n_drafts)
        seconds = time.perf_counter() - started
        if n_drafts > 0:
            session.retract(0, n_drafts)
        return seconds


def _session(
    model: _core.Model, file: ModelFile, hh: float, args: argparse.Namespace
) -> _core.Session:
    options = CacheOptions(hh=hh, n_ctx=args.n_ctx, n_batch=_CHUNK).resolve(file)
    options.max_drafts = max(args.most)
    return _core.Session(model, options)


def _models(folder: Path, args: argparse.Namespace, scale: float) -> dict[str, Path]:
    """The model, with a layer for multi-token prediction, and its draft model."""
    shape = config(args.shape)
    n_layers = args.layers or shape["num_hidden_layers"]
    name = f"{args.shape}-{n_layers}-{scale}"
    paths = {"model": folder / f"{name}.gguf", "draft": folder / f"{name}-{args.draft_layers}.gguf"}
    if not paths["model"].exists():
        shape |= {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "num_hidden_layers": n_layers,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": n_layers + 1,
            **dict.fromkeys(("n_routed_experts", "num_experts_per_tok"), 1),
            "moe_intermediate_size": 32,
            "attention_bias": False,
        }
        write_model(paths["model"], shape, "Q8_0")
        _change(paths["model"], n_layers, scale)
    if not paths["draft"].exists():
        names = [tensor.name for tensor in GGUFReader(paths["model"]).tensors]
        others = [name for name in names if _layer(name) >= args.draft_layers]
        n_draft_layers = (args.draft_layers, GGUFValueType.UINT32)
        changed(
            paths["model"],
            paths["draft"],
            {f"{_ARCHITECTURE}.block_count": n_draft_layers},
            {},
            without=[*others, f"{_ARCHITECTURE}.nextn_predict_layers"],
        )
    return paths


def _layer(tensor: str) -> int:
    return int(tensor.split(".")[1]) if tensor.startswith("blk.") else -1


def _change(path: Path, n_layers: int, scale: float) -> None:
    """Scale the outputs of all layers but the first, which becomes the one that predicts."""
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path, "r+").tensors}
    for name, data in tensors.items():
        layer = _layer(name)
        first = tensors.get(name.replace(f"blk.{n_layers}.", "blk.0."))
        if layer == n_layers and first is not None:
            data[:] = first
        elif layer > 0 and name.endswith(("attn_output.weight", "ffn_down.weight")):
            scale_q8_0(data, scale)
    # It reads the embedding of a token as the first layer does, and no hidden state.
    n = tensors["output_norm.weight"].size
    tensors[f"blk.{n_layers}.nextn.enorm.weight"][:] = n**-0.5
    projection = _core.quantize("Q8_0", np.eye(n, 2 * n, dtype=np.float32), threads=1)
    tensors[f"blk.{n_layers}.nextn.eh_proj.weight"][:] = projection.reshape(n, -1)
