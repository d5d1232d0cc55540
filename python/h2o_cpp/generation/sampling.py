"""Sampling options, from Python to the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from h2o_cpp import _core
from h2o_cpp.arguments import check_float, check_int, check_strings, short

_DEFAULTS = _core.Sampling()
FLOATS: Final = tuple(n for n in vars(_core.Sampling) if isinstance(getattr(_DEFAULTS, n), float))
# Integer options and their minimum.
INTEGERS: Final = {
    "top_k": 0,
    "repeat_last_n": -1,
    "dry_allowed_length": 1,
    "dry_penalty_last_n": -1,
    "mirostat": 0,
}
NUMBERS: Final = (*FLOATS, *INTEGERS)


def default(name: str) -> float | int:
    """The default of one of NUMBERS."""
    number: float | int = getattr(_DEFAULTS, name)
    return round(number, 6)  # the core has float32


def make_sampling(given: Mapping[str, Any]) -> _core.Sampling:
    """Sampling options for the core; missing ones keep their defaults.

    Raises ValueError, and TypeError unless lists of strings are lists and logit_bias is a dict.
    """
    sampling = _core.Sampling()
    for name in FLOATS:
        if name in given:
            number = check_float(name, given[name])
            if name == "top_n_sigma" and number == -1:  # off, as in llama.cpp
                number = 0
            setattr(sampling, name, number)
    for name, least in INTEGERS.items():
        if name in given:
            setattr(sampling, name, check_int(name, given[name], least))
    if (breakers := given.get("dry_sequence_breakers")) is not None:
        sampling.dry_sequence_breakers = check_strings("dry_sequence_breakers", breakers)
    if (samplers := given.get("samplers")) == "llama.cpp":
        sampling.set_llama_cpp_samplers()
    elif samplers is not None:
        sampling.set_samplers(check_strings("samplers", samplers))
    if (biases := given.get("logit_bias")) is not None:
        sampling.set_logit_bias(_biases(biases))
    sampling.check()
    return sampling


def _biases(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias={short(biases)}, expected a dict from token id to bias")
    return {
        check_int("logit_bias", token, 0): check_float(f"logit_bias[{token}]", bias)
        for token, bias in biases.items()
    }
