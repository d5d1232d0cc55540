"""The commands of each step of a check."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from h2o_bench.engine_names import LLAMA_CPP, OURS, TORCH
from h2o_bench.gpu_check.built import test_program
from h2o_bench.gpu_check.command import NOT_SUPPORTED, OK, Command, Result
from h2o_bench.gpu_plan import QUICK, Plan

STEPS = ["build", "smoke", "tests", "ours", "peers", "sanitize"]

_PYTHON_TESTS = [
    "test_device.py",
    "test_conformance.py",
    "test_cache_properties.py",
    "test_generator.py",
    "test_snapshot.py",
]

# Small test cases of every kernel; sanitizers are a hundred times slower.
SANITIZED = {
    "": [
        "relu",
        "gelu*",
        "swiglu",
        "geglu",
        "softcap",
        "scale and add",
        "layer_norm",
        "rms_norm",
        "embed gives rows*",
        "gather*",
        "argmax*",
        "the largest logits come first*",
        "of equal scores*",
        "K and V of two types",
        "each layer follows*",
        "a sequence begins to roll*",
        "short chunks over many keys",
        "operations of one pass*",
        "graphs do not affect*",
        "the Gram matrices*",
    ],
    " of products": ["products with weights of every type", "gated products*"],
    " of experts and archives": [
        "rows are routed*",
        "dispatch copies rows*",
        "one expert gets all rows*",
        "an empty archive*",
        "the pages with the largest estimates*",
        "a sequence with an archive can be transferred",
    ],
}

_MODELS = ["tests/data/golden/llama_gqa2_tied.gguf", "models/tiny-opt.gguf"]

# Some launches of decode steps with Nsight Compute: how long, and how close to the memory's limit.
_PROFILE = "profile"
_PROFILED = 2  # models
_PROFILER = [
    "ncu", "--clock-control", "none", "--target-processes", "all", "--kernel-name",
    "regex:matvec|decode_kernel|finish|rms_norm", "--launch-skip", "300", "--launch-count", "60",
    "--metrics",
    "gpu__time_duration.sum,dram__bytes_read.sum,"
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
]  # fmt: skip

_MODEL_BYTES = 60 << 30  # largest file that a command writes
_LATER = 30  # seconds for what a measurement has begun in time


@dataclass(frozen=True)
class Check:
    """What the commands depend on."""

    root: Path
    out: Path
    build: Path
    device: str = "cuda"
    arch: str = "90"
    jobs: int = 2
    doctest: Path | None = None
    defines: Iterable[str] = ()
    cublas: bool = True  # required
    quick: bool = False  # small models
    llama_cpp: Path | None = None  # a directory of its programs
    models: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)  # environment of every command

    @property
    def package(self) -> Path:
        """The directory from which h2o_cpp is imported."""
        return self.build / "package"

    @property
    def site(self) -> Path:
        """The directory of installed wheels."""
        return self.build / "site"


def commands(step: str, check: Check) -> list[Command]:
    """The commands of a step. Raises RuntimeError or FileNotFoundError."""
    return {
        "build": _build,
        "smoke": _smoke,
        "tests": _tests,
        "ours": _ours,
        "sanitize": _sanitize,
        "peers": _peers,
    }[step](check)


def judged(result: Result, output: str) -> Result:
    """A tool that does not support the device, as with some virtual ones, or may not measure it, is
    no failure.
    """
    if result.status == OK:
        return result
    if result.step == "sanitize" and "Device not supported" in output:
        result.status = NOT_SUPPORTED
    if result.name.startswith(_PROFILE) and (
        result.status == "cannot start" or "ERR_NVGPUCTRPERM" in output
    ):
        result.status = NOT_SUPPORTED
    return result


def find_doctest(directory: Path, build: Path) -> str:
    """The CMake package directory of doctest, made from its header."""
    if not (directory / "doctest" / "doctest.h").is_file():
        raise FileNotFoundError(f"{directory} has no doctest/doctest.h")
    package = build / "doctest"
    package.mkdir(parents=True, exist_ok=True)
    (package / "doctestConfig.cmake").write_text(
        "if(NOT TARGET doctest::doctest)\n"
        "  add_library(doctest::doctest INTERFACE IMPORTED)\n"
        "  set_target_properties(doctest::doctest PROPERTIES"
        f' INTERFACE_INCLUDE_DIRECTORIES "{directory.resolve()}")\n'
        "endif()\n"
    )
    return f"-Ddoctest_DIR={package}"


def find_cublas(paths: Iterable[str]) -> list[Path]:
    """The directories of cuBLAS among Python's package directories."""
    places = [Path(path) / "nvidia" / name / "lib" for path in paths for name in ("cu13", "cublas")]
    return [place for place in places if any(place.glob("libcublas.so.*"))]


def install_wheels(wheels: Path, site: Path) -> None:
    """Install wheels from a directory without network access."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise FileNotFoundError(f"{wheels} has no wheels")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run(
        [*pip, "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site), *files],
        check=True,
    )


def models_directory(nbytes: int = _MODEL_BYTES) -> Path:
    """An empty directory for models: in memory if there is room, else where there is most.

    The name is fixed, so that the next run deletes what a killed one left.
    """
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    for place in places:
        shutil.rmtree(place / "h2o_gpu_check", ignore_errors=True)
    free = {place: shutil.disk_usage(place).free for place in places if place.is_dir()}
    roomy = [place for place, room in free.items() if room >= nbytes]
    directory = (roomy or [max(free, key=lambda place: free[place])])[0] / "h2o_gpu_check"
    directory.mkdir(parents=True)
    return directory


def _build(check: Check) -> list[Command]:
    """Commands that build the C++ tests and an importable package."""
    done = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"],
        capture_output=True,
        text=True,
        env=dict(check.variables),
    )
    if done.returncode:
        raise RuntimeError((done.stderr.splitlines() or ["python -m pybind11 failed"])[-1])
    configure = [
        "cmake", "-G", "Ninja", "-S", ".", "-B", str(check.build),
        "-DCMAKE_BUILD_TYPE=Release", "-DH2O_TESTS=ON", "-DH2O_PYTHON=ON", "-DH2O_CUDA=ON",
        f"-DCMAKE_CUDA_ARCHITECTURES={check.arch}",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={done.stdout.strip()}",
    ]  # fmt: skip
    if check.doctest:
        configure.append(find_doctest(check.doctest, check.build))
    configure += [f"-D{define}" for define in check.defines]
    build = str(check.build)
    return [
        Command("configure", configure, 60),
        Command("compile", ["cmake", "--build", build, "-j", str(check.jobs)], 540),
        Command("install", ["cmake", "--install", build, "--prefix", str(check.package)], 60),
    ]


def _smoke(check: Check) -> list[Command]:
    words = [sys.executable, "-m", "h2o_bench.gpu_check.smoke", check.device]
    words += [] if check.cublas else ["--no-cublas"]
    if check.quick:
        words += ["--steps", "10"]
    else:
        words += ["--large", str(check.models or check.build)]
    models = _MODELS[:1] if check.quick else _MODELS
    return [Command("decode", [*words, *(str(check.root / path) for path in models)], 180)]


def _tests(check: Check) -> list[Command]:
    ctest = ["ctest", "--test-dir", str(test_program(check.build).parent), "-L", "cuda", "-V"]
    return [
        Command("C++", [*ctest, "-j3"], 300),
        Command(
            "Python",
            # Only the project's own pytest plugins. Not in parallel: some tests compare the
            # device's free memory.
            [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n0", "-p", "no:cacheprovider",
             "-k", "cuda or test_device", *(f"tests/python/{name}" for name in _PYTHON_TESTS)],
            300,
            {"H2O_TEST_DEVICE": check.device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        ),
    ]  # fmt: skip


def _bench(check: Check, name: str, seconds: float, section: str, *words: str) -> Command:
    models = check.models or check.build
    return Command(
        name,
        [sys.executable, "tools/bench/gpu", "--results", str(check.out / "gpu.jsonl"),
         "--page", str(check.out / "gpu.md"), "--models", str(models), "--device", check.device,
         *(["--quick"] if check.quick else []),
         "--sections", section, "--seconds", f"{seconds - _LATER:.0f}", *words],
        seconds,
    )  # fmt: skip


def _ours(check: Check) -> list[Command]:
    """One model per command, so that results survive later failures."""
    plan = QUICK if check.quick else Plan()
    ours = ["--engines", OURS]

    def of(section: str, seconds: float, models: Iterable[tuple[object, ...]]) -> list[Command]:
        return [
            _bench(
                check, f"{section} {shape} {type_name}", seconds,
                section, "--shapes", shape, "--types", type_name, *ours,
            )
            for shape, type_name in dict.fromkeys((str(one[0]), str(one[1])) for one in models)
        ]  # fmt: skip

    grid = of("grid", 120, plan.grid)
    return [
        _bench(check, "machine", 120, "machine"),
        *grid,
        *of("paper", 240, plan.paper),
        _bench(check, "large", 300, "large", *ours),
        *(_profiled(check, command) for command in grid[:_PROFILED]),
    ]


def _profiled(check: Check, grid: Command) -> Command:
    """A measurement under the profiler. Its own numbers would be slower, so they are left in the
    build directory.
    """
    ours = str(check.out / "gpu.")
    beside = str(check.build / "profile.")
    return replace(
        grid,
        name=grid.name.replace("grid", _PROFILE),
        words=[*_PROFILER, *(word.replace(ours, beside) for word in grid.words)],
        seconds=240,
        variables={"H2O_CUDA_GRAPHS": "0"},  # each launch on its own
    )


def _sanitize(check: Check) -> list[Command]:
    return [
        Command(
            f"{tool}{what}",
            ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1",
             str(test_program(check.build)), f"--test-case={','.join(cases)}"],
            240,
            {"H2O_TEST_DEVICE": check.device},
        )
        for tool in ("memcheck", "racecheck")
        for what, cases in SANITIZED.items()
    ]  # fmt: skip


def _peers(check: Check) -> list[Command]:
    plan = QUICK if check.quick else Plan()
    torch = ["--engines", TORCH]
    llama_cpp = ["--engines", f"{OURS},{LLAMA_CPP}", "--llama-cpp", str(check.llama_cpp)]
    models = plan.peers if check.llama_cpp else []
    return [
        *(
            _bench(
                check, f"{LLAMA_CPP} {shape} {type_name}", 150,
                "peers", "--shapes", shape, "--types", type_name, *llama_cpp,
            )
            for shape, type_name in models
        ),
        _bench(check, f"{TORCH}, paper", 240, "paper", *torch),
        *(
            _bench(check, f"{TORCH} {shape}", 300, "peers", "--shapes", shape, *torch)
            for shape in plan.peer_torch
        ),
        _bench(check, f"{TORCH}, large", 240, "large", *torch),
    ]  # fmt: skip
