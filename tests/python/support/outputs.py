"""Random options of outputs of a small model, and everything that an output leaves."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from h2o_cpp import Generator
from h2o_cpp.generation.stats import LayerStats

N_VOCAB = 61


def only_some(tokens: Any, mask: Any) -> None:
    """Allows every second token, in turns, so that outputs repeat."""
    mask[:] = 0x55555555 << len(tokens) % 2


OPTION_SETS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0]),
        "seed": st.integers(0, 99),
        "max_tokens": st.integers(1, 60),
        "ignore_eos": st.booleans(),
    },
    optional={
        "stop": st.just(["aba", "bb b"]),
        "constraint": st.just(only_some),
        "repeat_penalty": st.just(1.2),
    },
)


def left(generator: Generator, prompt: list[int], options: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that an output leaves: its pieces, its end, its snapshot and the cache."""
    stream = generator.stream(prompt, **options)
    pieces = list(stream)
    stats = generator.stats(layers=True)
    layers: tuple[LayerStats, ...] = stats.layers
    last = stats.n_kv_heads - 1
    arrays = (array for layer in range(len(layers)) for array in generator.kept(layer, last))
    kept = [array.tobytes() for array in arrays]
    return pieces, stream.tokens, stream.finish_reason, stream.save().data, layers, kept
