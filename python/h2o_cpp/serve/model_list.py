"""The models of a directory or a TOML file, each with its options."""

from __future__ import annotations

import difflib
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from h2o_cpp.files.gguf_names import model_stem
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.generator import Generator
from h2o_cpp.model.chat_template import read_template
from h2o_cpp.options import GeneratorOptions, option_names
from h2o_cpp.serve.catalog import Entry
from h2o_cpp.serve.options import ServiceOptions
from h2o_cpp.serve.service import Service

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_OF_SERVICE = {*option_names(ServiceOptions)} - {"defaults"}
_OF_DEFAULTS = {  # the field of each option
    "sampling": "sampling",
    "chat_template_kwargs": "variables",
    "truncation": "truncation",
}


def read_models(path: Path, generator: GeneratorOptions, service: ServiceOptions) -> list[Entry]:
    """The models of a directory, named after their files, or of a TOML file with a table for each.

    generator, service: defaults of the options of Generator and Service.

    Raises FileNotFoundError, and ValueError for an invalid file or option.
    """
    if path.is_dir():
        tables = {name: {"model": str(file)} for name, file in _files(path).items()}
        if not tables:
            raise ValueError(f"{path}: there are no models in this directory (*.gguf)")
    else:
        tables = _read_toml(path)
    return [_entry(path, name, table, generator, service) for name, table in tables.items()]


def _files(folder: Path) -> dict[str, Path]:
    """The models in a directory by name; for a split model, its first file."""
    files = ((model_stem(file.name), file) for file in sorted(folder.glob("*.gguf")))
    return {stem: file for stem, file in files if stem is not None}


def _read_toml(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict) or not isinstance(table.get("model"), str):
            raise ValueError(f'{path}: {name}: expected a table, [{name}], with model = "FILE"')
    if not tables:
        raise ValueError(f"{path}: there are no models in it")
    return tables


def _entry(
    path: Path,
    name: str,
    table: dict[str, Any],
    generator: GeneratorOptions,
    service: ServiceOptions,
) -> Entry:
    own = dict(table)
    model = own.pop("model")
    beside = path.parent / model
    if "://" not in model and beside.exists():  # otherwise a pulled model or a Hub source
        model = str(beside)
    known = {*option_names(GeneratorOptions), *_OF_SERVICE, *_OF_DEFAULTS, "aliases"}
    for option in own:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{path}: {name}: there is no option {option!r}{hint}")
    aliases = own.pop("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(one, str) for one in aliases):
        raise ValueError(f"{path}: {name}: aliases={aliases!r}, expected a list of names")
    limits = {key: own.pop(key) for key in _OF_SERVICE if key in own}
    defaults = {_OF_DEFAULTS[key]: own.pop(key) for key in _OF_DEFAULTS if key in own}
    for names in (("max_sequences", "memory"), ("hh", "cache_memory", "recent")):
        if own.keys() & {*names[:2]}:  # exclusive, as on the command line; recent is a part of hh
            own = dict.fromkeys(names) | own
    try:
        options = replace(generator, **own).with_policy(service.defaults.policy)
        defaults["policy"] = options.policy_name
        if "template" in table:
            limits["template"] = read_template(limits["template"], path.parent)
        served = replace(service, defaults=replace(service.defaults, **defaults), **limits)
        if not path.is_dir() and os.path.isfile(model):  # a file of a directory may be no model
            options.slab_bytes(ModelFile.find(model))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {name}: {error}") from None
    n_bytes, changed = _size(model)
    return Entry(
        name,
        partial(_load, name, model, options, served),
        n_bytes=n_bytes,
        aliases=aliases,
        file=model,
        template=served.template,
        spec=(model, changed, options, served),
    )


def _load(
    name: str, model: str, options: GeneratorOptions, served: ServiceOptions, opened: ExitStack
) -> Service:
    generator = opened.enter_context(Generator(model, **vars(options)))
    return Service(generator, name=name, options=served)


def _size(model: str) -> tuple[int, float]:
    """A file's size and modification time; zeros if it is not a file."""
    try:
        found = os.stat(model)
    except (OSError, ValueError):
        return 0, 0.0
    return found.st_size, found.st_mtime
