"""Sliding windows: layers in which a token attends only to the newest tokens."""

from h2o_cpp.convert.config import Config, Metadata, dimension, flag, layer_flags

_KINDS = {"full_attention": False, "sliding_attention": True}


def window_of_every_layer(config: Config) -> Metadata:
    """Mistral: `sliding_window` applies to every layer."""
    return {} if config.get("sliding_window") is None else _window(config)


def window_of_some_layers(config: Config, usual: list[bool]) -> Metadata:
    """With `use_sliding_window`: the layers in `layer_types`, by default those in `usual`."""
    if not flag(config, "use_sliding_window", False) or config.get("sliding_window") is None:
        return {}
    slides = usual if config.get("layer_types") is None else sliding_layers(config)
    window = _window(config) if any(slides) else {}
    return window | {"attention.sliding_window_pattern": slides} if window else {}


def window_of_last_layers(config: Config) -> Metadata:
    """Qwen2 and 3: with `use_sliding_window`, `max_window_layers` is the first layer with a
    window, unless `layer_types` lists them.
    """
    n_layers, first = dimension(config, "num_hidden_layers"), _max_window_layers(config)
    return window_of_some_layers(config, [i >= first for i in range(n_layers)])


def window_of_first_layers(config: Config) -> Metadata:
    """Qwen2's mixtures: by default every other one of the first `max_window_layers`."""
    n_layers, end = dimension(config, "num_hidden_layers"), _max_window_layers(config)
    return window_of_some_layers(config, [i % 2 == 0 and i < end for i in range(n_layers)])


def window_if_used(config: Config) -> Metadata:
    """Qwen3's mixtures: `use_sliding_window` applies to every layer."""
    return window_of_every_layer(config) if flag(config, "use_sliding_window", False) else {}


def _max_window_layers(config: Config) -> int:
    value = config.get("max_window_layers", 28)
    if not isinstance(value, int):
        raise ValueError(f"config.json: max_window_layers must be an integer, found {value!r}")
    return value


def window_of_pattern(config: Config, period: int) -> Metadata:
    """Gemma 3 and EXAONE: `sliding_window_pattern` is the period, or written like "LLLG"."""
    key = "sliding_window_pattern"
    pattern = config.get(key)
    if not isinstance(pattern, str):
        return window_of_listed_layers(config, period, dimension(config, key, period))
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise ValueError(
            f'config.json: {key} must be a number or a text like "LLLG", found {pattern!r}'
        )
    return window_of_listed_layers(config, period, len(pattern))


def window_of_listed_layers(
    config: Config, period: int, default_period: int | None = None
) -> Metadata:
    """Gemma 2: the layers in `layer_types`, by default all but the last of each period.

    period: the architecture's; default_period: config.json's, if it may differ.
    """
    usual = _all_but_last(config, period)
    if config.get("layer_types") is not None:
        slides = sliding_layers(config)
    else:
        slides = _all_but_last(config, default_period or period)
    window: Metadata = {"attention.sliding_window": dimension(config, "sliding_window", 4096)}
    return window if slides == usual else window | {"attention.sliding_window_pattern": slides}


def _all_but_last(config: Config, period: int) -> list[bool]:
    return [(i + 1) % period != 0 for i in range(dimension(config, "num_hidden_layers"))]


def sliding_layers(config: Config) -> list[bool]:
    """Which layers have a window, by `layer_types`. Raises ValueError if it is invalid."""
    return layer_flags(config, _KINDS)


def _window(config: Config) -> Metadata:
    """Empty for a window as long as the context, which has no effect."""
    size = dimension(config, "sliding_window")
    if size >= dimension(config, "max_position_embeddings"):
        return {}
    return {"attention.sliding_window": size}
