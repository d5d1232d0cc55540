"""The results so far, in a file, so that an interrupted check can continue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from h2o_bench.gpu_check.command import Result

_COMPILED = [
    "CMakeLists.txt",
    "cpp",
    "cuda",
    "python/bindings",
    "tests/cpp",
    "tests/cuda_emulation",
]


def sources_digest(root: Path) -> str:
    """A hash of the compiled sources and their path, which the test program contains."""
    digest = sha256(str(root).encode())
    for name in _COMPILED:
        path = root / name
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            digest.update(f"{file.relative_to(root)}\0".encode())
            digest.update(sha256(file.read_bytes()).digest())
    return digest.hexdigest()


class Journal:
    """The results, in the order in which commands first ran.

    Attributes: `sources`, a digest of the sources; `kept`, that of the binaries beside it, or "".

    If the file cannot be written, that is reported once, and results stay in memory.
    """

    def __init__(self, path: Path, sources: str) -> None:
        """Read the file, unless it is invalid or of other sources."""
        self._path = path
        self.sources = sources
        self.kept = ""
        self._complained = False
        self.results: list[Result] = []
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self.kept = str(found.get("kept", ""))
            if found["sources"] == sources:
                self.results = [Result(**row) for row in found["results"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass

    def passed(self, step: str, name: str) -> bool:
        """Whether a command has passed."""
        return any(r.passed for r in self.results if (r.step, r.name) == (step, name))

    def add(self, result: Result) -> None:
        """Add a result, replacing the command's previous one."""
        for i, known in enumerate(self.results):
            if (known.step, known.name) == (result.step, result.name):
                self.results[i] = result
                break
        else:
            self.results.append(result)
        results = [asdict(r) for r in self.results]
        written = {"sources": self.sources, "kept": self.kept, "results": results}
        beside = self._path.with_suffix(".new")
        try:
            beside.write_text(json.dumps(written, indent=1), encoding="utf-8")
            beside.replace(self._path)  # atomic
        except OSError as error:
            beside.unlink(missing_ok=True)
            if not self._complained:
                self._complained = True
                print(f"results are not kept: {self._path.name}: {error.strerror}", flush=True)

    def of(self, steps: Iterable[str]) -> list[Result]:
        """The results of these steps."""
        wanted = set(steps)
        return [r for r in self.results if r.step in wanted]


def table(results: Sequence[Result]) -> str:
    """The rows, aligned."""
    columns = ("passed", "failed", "skipped")
    lines = [f"{'':<34}{'status':<18}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}"]
    for r in results:
        counts = "".join(f"{r.counts.get(name, ''):>8}" for name in columns)
        lines.append(f"{f'{r.step}: {r.name}':<34}{r.status:<18}{counts}{r.seconds:>9.1f}")
    return "\n".join(lines)
