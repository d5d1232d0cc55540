"""tools/cuda_resources: parsing of the compiler's output, and detection of regressions."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "cuda_resources"
CUDA = ROOT / "cuda"

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1av' for 'sm_90'
ptxas info    : Function properties for _Z1av
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 64 bytes smem
ptxas info    : Compiling entry function '_Z1bv' for 'sm_90'
ptxas info    : Function properties for _Z1bv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_resources_are_parsed_from_ptxas_log(script: dict[str, Any]) -> None:
    found = script["resources_of"](LOG)
    assert found == {"_Z1av": (40, 8, 4, 64, 0), "_Z1bv": (255, 0, 0, 0, 0)}


def test_loads_before_the_wait_are_counted(script: dict[str, Any]) -> None:
    def code(*opcodes: int) -> bytes:  # with a predicate above the opcode
        return b"".join((opcode | 0x7000).to_bytes(16, "little") for opcode in opcodes)

    load, generic, to_shared, store, wait = 0x981, 0x980, 0xFAE, 0x986, 0x82E
    assert script["early_loads"](code(load, store, generic, to_shared, wait, load)) == 3
    assert script["early_loads"](code(load, store)) == 0


def test_loads_of_constants_after_the_wait_are_counted(script: dict[str, Any]) -> None:
    # The output of nvdisasm -hex.
    constant = (0x0000A2000C1E9900 << 64 | 0x0000000608087981).to_bytes(16, "little")
    load = (0x000EA8000C1E1900 << 64 | 0x00000006060B7981).to_bytes(16, "little")
    strong = (0x000EA8000C1EF900 << 64 | 0x00000006060B7981).to_bytes(16, "little")
    wait = 0x782E.to_bytes(16, "little")
    assert script["late_constants"](constant + wait + load + strong) == 0
    assert script["late_constants"](load + wait + load + constant) == 1
    assert script["late_constants"](constant) == 0  # waits for nothing


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h2o::cuda::(anonymous namespace)::relu(float*, long)", "relu"),
        (
            "void h2o::cuda::f<h2o::cuda::(anonymous namespace)::Q<h2o::cuda::X>, 4>(h2o::KvView)",
            "f<Q<X>, 4>",
        ),
    ],
)
def test_kernel_names_are_shortened(script: dict[str, Any], name: str, expected: str) -> None:
    assert script["plain"](name) == expected


def test_loops_are_what_backward_branches_span(script: dict[str, Any]) -> None:
    code = [(0, "IADD3 R0, R1, R2, RZ"), (16, "@P0 LDG.E R1, [R2]"), (32, "@!P1 BRA 0x10")]
    code += [(48, "BRA 0x60"), (64, "EXIT")]
    assert script["loops_of"](code) == [["LDG", "BRA"]]


def test_regressions_are_reported(script: dict[str, Any]) -> None:
    kernel, resources = script["Kernel"], script["Resources"]
    old, new = kernel("sm_90", "a.cu", "old"), kernel("sm_90", "a.cu", "new")
    recorded = {old: resources(40, 0, 0, 64)}
    assert not list(script["worse"]({old: resources(40, 0, 0, 64)}, recorded))
    assert not list(script["worse"]({old: resources(30, 0, 0, 0, 2)}, recorded))
    early = {old: resources(40, 0, 0, 64, 3)}
    assert list(script["worse"](recorded, early)) == ["sm_90 a.cu old: early 3 -> 0"]
    assert list(script["worse"]({old: resources(48, 8, 0, 64)}, recorded)) == [
        "sm_90 a.cu old: registers 40 -> 48",
        "sm_90 a.cu old: stack 0 -> 8",
    ]
    assert list(script["worse"]({new: resources(40, 8, 4, 64)}, recorded)) == [
        "sm_90 a.cu new: new, with a stack of 8 bytes and 4 spilled"
    ]


def test_file_round_trip(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script["written"].__globals__, "compiler", lambda: "nvcc 1.2")
    table = {script["Kernel"]("sm_80", "a.cu", "f<X, 4>"): script["Resources"](1, 2, 3, 4, 5)}
    digests = {"a.cu": "0123", "b/c.cu": "4567"}
    text = script["written"](table, digests)
    assert text.splitlines()[0] == "# nvcc 1.2"
    assert script["read"](text) == (table, digests)


def test_digests_are_of_the_code(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a file and what it includes from cuda/ and cpp/kv/, without comments."""
    digest = script["digest"]
    monkeypatch.setitem(digest.__globals__, "ROOT", tmp_path)
    paths = [tmp_path / name for name in ("cuda/a.cu", "cuda/b.cuh", "cpp/kv/c.h", "cpp/io/d.h")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    a, b, c, d = paths
    a.write_text('#include "cuda/b.cuh"\n#include "io/d.h"\nint a;\n')
    b.write_text('#include "kv/c.h"\n#include "cuda/b.cuh"\nint b;\n')
    c.write_text("int c;\n")
    d.write_text("int d;\n")
    before = digest(a)
    c.write_text("// c\n  int c;\n")
    d.write_text("int e;\n")
    assert digest(a) == before
    c.write_text("int e;\n")
    assert digest(a) != before


def test_recorded_kernels_do_not_spill(script: dict[str, Any]) -> None:
    """In the recorded table of both architectures; decode attention uses no stack at all."""
    recorded, digests = script["read"](script["RECORDED"].read_text(encoding="utf-8"))
    files = {p.relative_to(CUDA).as_posix() for p in CUDA.rglob("*.cu")}
    assert files == set(digests)
    assert {kernel.arch for kernel in recorded} == {"sm_80", "sm_90"}
    assert not [kernel for kernel, found in recorded.items() if found.spilled]
    decode = {k: r for k, r in recorded.items() if k.name.startswith("decode_kernel")}
    # Types and group sizes: original and rolling positions; and the element-wise kernel.
    assert len(decode) == 2 * ((5 * 3 + 2) + 6 * 2 + 3)
    assert not [kernel for kernel, found in decode.items() if found.stack]
    # Weights of the norms and of products, and segments of a first turn, do not wait for the
    # previous kernel.
    products = r"matvec_kernel<(Plain|Quant)|gemm_(narrow_)?k"
    kinds = rf"(rms|layer)_norm|finish|decode|store_kv_kernel<f|{products}"
    early = {k: r for k, r in recorded.items() if k.arch == "sm_90" and re.match(kinds, k.name)}
    assert len({k.name.split("_")[0] for k in early}) == 7
    assert not [kernel for kernel, found in early.items() if found.early == 0]
    # Only the sines of large angles use an indexed array.
    stacks = {kernel.name for kernel, found in recorded.items() if found.stack}
    assert stacks == {"roll_kernel", "rope_table_kernel"}
