"""Describe a GGUF file: what model it holds, its types, and what its cache would take."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

from h2o_cpp import _core

_LONG = 8  # arrays longer than this are counted, not shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a GGUF file")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the description."""
    file = _core.GgufFile(args.file)
    metadata = {key: _short(value) for key, value in file.metadata().items()}
    tensors = file.tensors()
    by_type: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for _, dtype, shape, nbytes in tensors:
        row = by_type[dtype]
        row[0] += 1
        row[1] += prod(shape)
        row[2] += nbytes
    parameters = sum(n for _, n, _ in by_type.values())

    if args.json:
        types = {
            dtype: {"tensors": n, "parameters": p, "bytes": b}
            for dtype, (n, p, b) in by_type.items()
        }
        document: dict[str, Any] = {
            "file": str(args.file),
            "gguf_version": file.version,
            "parameters": parameters,
            "types": types,
            "metadata": metadata,
        }
        if args.tensors:
            document["tensors"] = [
                {"name": name, "type": dtype, "shape": shape, "bytes": nbytes}
                for name, dtype, shape, nbytes in tensors
            ]
        print(json.dumps(document, indent=2))
        return 0

    print(f"{args.file}: GGUF v{file.version}, {parameters:,} parameters, {len(tensors)} tensors")
    print("\ntypes")
    for dtype, (n, p, b) in sorted(by_type.items()):
        print(f"  {dtype:8} {n:5} tensors {p:15,} parameters {mebibytes(b):>12}")
    print("\nmetadata")
    for key, value in metadata.items():
        print(f"  {key} = {value if isinstance(value, str) else json.dumps(value)}")
    if args.tensors:
        print("\ntensors")
        for name, dtype, shape, nbytes in tensors:
            print(f"  {name:32} {dtype:6} {'x'.join(map(str, shape)):>16} {mebibytes(nbytes):>12}")
    return 0


def mebibytes(n: int) -> str:
    """`n` bytes for people."""
    return f"{n / 2**20:.2f} MiB"


def _short(value: Any) -> Any:
    if isinstance(value, list) and len(value) > _LONG:
        return f"[{len(value)} values]"
    return value
