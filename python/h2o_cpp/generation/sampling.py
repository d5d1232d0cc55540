"""Sampling options, from Python to the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from h2o_cpp import _core
from h2o_cpp.model.arguments import check_float, check_int, short

FLOATS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "dry_multiplier",
    "dry_base",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "mirostat_tau",
    "mirostat_eta",
)
# Integer options and their minimum.
INTEGERS: Final = {
    "top_k": 0,
    "repeat_last_n": -1,
    "dry_allowed_length": 1,
    "dry_penalty_last_n": -1,
    "mirostat": 0,
}
NUMBERS: Final = (*FLOATS, *INTEGERS)

# samplers="llama.cpp": llama.cpp's order, with the temperature last.
LLAMA_CPP: Final = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)


def default(name: str) -> float | int:
    """The default of one of NUMBERS."""
    number: float | int = getattr(_core.Sampling(), name)
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
    sampling.dry_sequence_breakers = _strings(given, "dry_sequence_breakers")
    if given.get("samplers") == "llama.cpp":
        sampling.set_samplers(LLAMA_CPP)
    else:
        sampling.set_samplers(_strings(given, "samplers"))
    if (biases := given.get("logit_bias")) is not None:
        sampling.set_logit_bias(_biases(biases))
    sampling.check()
    return sampling


def _strings(given: Mapping[str, Any], name: str) -> Sequence[str] | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={short(value)}, expected a list of strings")
    if not all(isinstance(one, str) for one in value):
        raise TypeError(f"{name}={short(value)}, expected a list of strings")
    return value


def _biases(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias={short(biases)}, expected a dict from token id to bias")
    return {
        check_int("logit_bias", token, 0): check_float(f"logit_bias[{token}]", bias)
        for token, bias in biases.items()
    }
