"""Checks that h2o.h is ABI-compatible with the recorded abi.txt.

    check_abi.py --cc=cc --header=cpp/capi/h2o.h tests/cpp/abi.txt
    check_abi.py --cc=cc --header=cpp/capi/h2o.h --record tests/cpp/abi.txt

abi.txt has the functions, constants and initializers of one H2O_ABI_VERSION, and the fields of each
structure with their offsets, which the target's compiler checks. Recorded declarations must not
change; additions, including fields at the end of structures, are recorded by --record.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STRUCT = re.compile(r"^typedef struct (\w+) \{\n(.*?)^\} \1;", re.M | re.S)
FIELD = re.compile(r"(.+?[ *])(\w+)")  # const char* device


def declarations(header: str) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Lines for functions, constants and initializers; the fields (struct, type, name)."""
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S).replace("\\\n", " ")
    lines = [
        " ".join(line.split())
        for line in re.findall(r"^H2O_API [^;]*;", header, re.M)
        + re.findall(r"^typedef int32_t [^;]*;", header, re.M)
        + re.findall(r"^  H2O_\w+ = \d+", header, re.M)
        + re.findall(r"^#define H2O_\w+ +(?:\{.*\}|\d+)$", header, re.M)
    ]
    fields = []
    for struct, body in STRUCT.findall(header):
        for field in body.split(";")[:-1]:
            if (match := FIELD.fullmatch(" ".join(field.split()))) is None:
                raise ValueError(f"{struct}: {field!r} is not one field")
            fields.append((struct, match[1].strip(), match[2]))
    return lines, fields


def compile_c(cc: list[str], header: Path, text: str, to: Path, *flags: str) -> None:
    source = to.with_suffix(".c")
    source.write_text(f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\n{text}\n')
    if subprocess.run([*cc, "-std=c11", "-Werror", *flags, source, "-o", to]).returncode != 0:
        sys.exit("field offsets have changed: that requires a new H2O_ABI_VERSION")


def offsets(cc: list[str], header: Path, fields: list[tuple[str, str, str]], at: Path) -> list[str]:
    """Offsets on this machine, e.g. "h2o_model_options 8 const char* device"."""
    prints = [
        f'  printf("{struct} %zu {kind} {name}\\n", offsetof({struct}, {name}));'
        for struct, kind, name in fields
    ]
    compile_c(cc, header, "int main(void) {\n" + "\n".join(prints) + "\n}", at)
    return subprocess.run([at], check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cc", required=True, help="the compiler of C, and its options")
    parser.add_argument("--header", type=Path, required=True)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("recorded", type=Path)
    args = parser.parse_args()
    cc, header = args.cc.split(), args.header.resolve()
    lines, fields = declarations(header.read_text())

    with tempfile.TemporaryDirectory() as name:
        if args.record:
            known = offsets(cc, header, fields, Path(name) / "offsets")
            args.recorded.write_text("\n".join(lines + known) + "\n")
            return 0
        recorded = args.recorded.read_text().splitlines()
        layout = [match for line in recorded if (match := re.match(r"(h2o_\w+) (\d+) (.*)", line))]
        plain = [line for line in recorded if not re.match(r"h2o_\w+ \d+ ", line)]
        asserts = [
            f'_Static_assert(offsetof({struct}, {field.split()[-1]}) == {offset}, "{struct}");'
            for struct, offset, field in (match.groups() for match in layout)
        ]
        compile_c(cc, header, "\n".join(asserts), Path(name) / "check", "-c")

    known_fields = {(m[1], m[3]) for m in layout}
    now_fields = {(struct, f"{kind} {name}") for struct, kind, name in fields}
    gone = sorted(set(plain) - set(lines)) + sorted(map(" ".join, known_fields - now_fields))
    new = sorted(set(lines) - set(plain)) + sorted(map(" ".join, now_fields - known_fields))
    sized = {struct for struct, kind, name in fields if (kind, name) == ("size_t", "size")}
    for line in gone:
        if not any(n.startswith(line.rstrip("}")) for n in new):  # initializers may be extended
            print(f"changed or removed: {line}\nbreaks programs: requires a new H2O_ABI_VERSION")
    for line in new:
        struct = line.split()[0]
        if struct in {m[1] for m in layout} - sized:
            print(f"{struct} has no size field and was extended: requires a new H2O_ABI_VERSION")
        print(f"not recorded: {line}\nrun {Path(__file__).name} with --record")
    if gone or new or not lines or not fields:
        return 1
    print(f"{len(lines)} declarations and {len(fields)} fields, as recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
