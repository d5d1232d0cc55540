"""Imports inside the package point downwards: from the public modules to the core."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import h2o_cpp

PACKAGE = Path(h2o_cpp.__file__).parent

# Highest first. A folder may import folders of lower lines; "" stands for the top-level
# modules, which users import.
ORDER = [
    ["__main__"],
    ["cli"],
    ["ray"],
    ["serve", "eval"],
    [""],
    ["measure"],
    ["generation", "convert", "quantize"],
    ["model"],
    ["options"],
    ["budget"],
    ["files"],
    ["reply"],
    ["grammars"],
    ["arguments"],
    ["_core"],
]
LEVELS = {name: level for level, names in enumerate(ORDER) for name in names}


def folder_of(module: str) -> str:
    """The entry of ORDER of a module, named relative to the package."""
    first = module.partition(".")[0]
    return first if first in LEVELS else ""


def imported(source: str) -> Iterator[str]:
    """The package's modules that a source imports anywhere, named relative to the package."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module="h2o_cpp", names=aliases, level=0):
                names = [f"h2o_cpp.{alias.name}" for alias in aliases]
            case ast.ImportFrom(module=str(module), level=0):
                names = [module]
            case ast.ImportFrom():
                raise ValueError(f"line {node.lineno}: a relative import")
            case _:
                continue
        for name in names:
            package, _, module = name.partition(".")
            if package == "h2o_cpp":
                yield module


def upward(file: str, source: str) -> list[str]:
    """The imports of a file (path relative to the package) that do not point down."""
    own = folder_of(file.removesuffix(".py").replace("/", "."))
    return [
        module
        for module in imported(source)
        if folder_of(module) != own and LEVELS[folder_of(module)] <= LEVELS[own]
    ]


def test_every_import_points_down() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        if modules := upward(file, path.read_text(encoding="utf-8")):
            found[file] = modules
    assert found == {}


def test_every_folder_is_in_order() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert "measure" in folders
    assert folders <= set(LEVELS)


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("model/session.py", "from h2o_cpp import _core", []),
        ("model/session.py", "from h2o_cpp.generation.stream import Stream", ["generation.stream"]),
        ("generation/stream.py", "def f():\n    import h2o_cpp.measure", ["measure"]),
        ("measure/speed.py", "from h2o_cpp import Generator, _core", ["Generator"]),
        ("measure/speed.py", "from h2o_cpp import __version__", ["__version__"]),
        ("convert/gpt.py", "from h2o_cpp import quantize", ["quantize"]),
        ("generator.py", "from h2o_cpp.chat import Chat\nimport numpy", []),
        ("cli/run.py", "from h2o_cpp import Generator\nimport h2o_cpp.cli.info", []),
    ],
)
def test_upward_imports_are_found(file: str, source: str, found: list[str]) -> None:
    assert upward(file, source) == found


def test_import_loads_no_slow_packages() -> None:
    """They take longer to import than all of h2o_cpp and are imported on first use."""
    packages = [
        "asyncio",
        "gguf",
        "google.protobuf",
        "jinja2",
        "sentencepiece",
        "tokenizers",
        "tqdm",
    ]
    code = f"import sys, h2o_cpp; print([p for p in {packages} if p in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
