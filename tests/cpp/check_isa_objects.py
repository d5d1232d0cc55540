"""Checks that instruction sets stay in their units.

A unit of cpu/isa only exports its table and calls no C++ library functions: the linker keeps one
copy of each weak symbol, which may contain instructions that the CPU does not support. No other
object contains AVX instructions, and no unit those of a higher instruction set.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

# A VEX or EVEX instruction: its mnemonic starts with v, and it has a vector or mask register.
AVX = re.compile(r"\sv\w+\s.*%[xyz]mm|%[yz]mm|\sk\w+\s.*%k[0-7]")

# Forbidden instructions; units that are not listed may contain any.
AVX512 = re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]")
AMX = re.compile(r"\s(tile\w+|(ld|st)tilecfg|tdp\w+)\b|%tmm")
BF16_ALONE = re.compile(r"\s(vdpbf16ps|vcvtne2?ps2bf16\w*|tdpbf16ps)\s")
BF16 = re.compile(rf"{BF16_ALONE.pattern}|{AMX.pattern}")
VNNI = re.compile(rf"\svpdp\w+\s|{BF16.pattern}")
AVX512_OR_VNNI = re.compile(f"{AVX512.pattern}|{VNNI.pattern}")
DOTPROD = re.compile(r"\s[su]dot\s+v")
BASELINE = re.compile(f"{AVX.pattern}|{AMX.pattern}|{DOTPROD.pattern}")
FORBIDDEN = {
    None: BASELINE,
    "scalar": BASELINE,
    "neon": DOTPROD,
    "x86_64_v3": AVX512_OR_VNNI,
    "x86_64_v3_vnni": AVX512,
    "x86_64_v4": VNNI,
    "x86_64_v4_vnni": BF16,
    "x86_64_v4_bf16": AMX,
    "x86_64_v4_amx_int8": BF16_ALONE,
}

# Symbols added by sanitizers, and a pointer to the unwinder's function; not code.
SANITIZER = re.compile(r"_*(asan|odr_asan|tsan|ubsan)|DW\.ref\.__gxx_personality_v0$")


# Tables of numbers; not code.
CONSTANT = re.compile(r"h2o::k[A-Z]\w*")

# Units that call the kernels of another, of a lower instruction set.
EXTENDED = {"x86_64_v4_amx_int8": "h2o::kernels_x86_64_v4_vnni"}


def run(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def isa_unit(path: Path) -> str | None:
    """The instruction set of an ISA object, x86_64_v3 for .../isa/x86_64_v3.cpp.o."""
    name = path.name.split(".")[0]
    return name if path.parent.name == "isa" and name != "detect" else None


def symbol_faults(nm: str, path: Path, unit: str) -> list[str]:
    # "0000000000000000 R h2o::kernels_scalar": upper case is global, and so are u, v and w.
    symbols = [
        re.fullmatch(r"[0-9a-f]*\s+(\w) (.*)", line).groups() for line in run(nm, "-C", path)
    ]
    symbols = [(kind, name) for kind, name in symbols if not SANITIZER.match(name)]
    called = [name for kind, name in symbols if kind == "U"]
    faults = [f"weak symbol {name}" for kind, name in symbols if kind in "WVuvw"]
    called = [name for name in called if not CONSTANT.fullmatch(name)]
    called = [name for name in called if name != EXTENDED.get(unit)]
    faults += [f"calls {name}, C++" for name in called if re.search(r"::|operator ", name)]
    exported = [(kind, name) for kind, name in symbols if kind.isupper() and kind not in "UWV"]
    table = f"h2o::kernels_{unit}"
    if [name for _, name in exported] != [table] or exported[0][0] not in "RDB":
        faults.append(f"exports {exported}, expected {table} alone, as data")
    return faults


def instruction_faults(objdump: str, path: Path, forbidden: re.Pattern[str]) -> list[str]:
    for line in run(objdump, "-d", "--no-show-raw-insn", path):
        if forbidden.search(line):
            return [f"instruction {' '.join(line.split())}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nm", required=True)
    parser.add_argument("--objdump", required=True)
    parser.add_argument("--skipped", type=int, required=True, help="exit status without objdump")
    parser.add_argument("objects", type=Path, nargs="+")
    args = parser.parse_args()

    units = {path: unit for path in args.objects if (unit := isa_unit(path)) is not None}
    has_objdump = shutil.which(args.objdump) is not None
    faults = [] if "scalar" in units.values() else ["no unit of cpu/isa among the objects"]
    for path in args.objects:
        found = symbol_faults(args.nm, path, units[path]) if path in units else []
        if has_objdump and (forbidden := FORBIDDEN.get(units.get(path))) is not None:
            found += instruction_faults(args.objdump, path, forbidden)
        faults += [f"{path}: {fault}" for fault in found]

    for fault in faults:
        print(fault)
    if faults:
        return 1
    if not has_objdump:
        print("symbols are correct; instructions not checked: objdump not found")
        return args.skipped
    print(f"{len(args.objects)} objects, {len(units)} of them of cpu/isa: correct")
    return 0


if __name__ == "__main__":
    sys.exit(main())
