"""Checks that the shared library exports the functions that h2o.h declares, and nothing else."""

import argparse
import re
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nm", required=True)
    parser.add_argument("--objdump", required=True, help="for DLLs, which nm does not support")
    parser.add_argument("--header", type=Path, required=True)
    parser.add_argument("library", type=Path)
    args = parser.parse_args()

    # H2O_API h2o_status h2o_stats(h2o_session* session, ...
    declared = set(re.findall(r"^H2O_API [\w\s*]*?\b(h2o_\w+)\(", args.header.read_text(), re.M))
    is_dll = args.library.suffix == ".dll"
    command = [args.objdump, "-p"] if is_dll else [args.nm, "-D", "--defined-only"]
    output = subprocess.run(
        [*command, args.library], check=True, capture_output=True, text=True
    ).stdout
    if is_dll:
        exported = set(re.findall(r"^\t\[ *\d+\] (\w+)$", output, re.M))
    else:
        exported = {line.split()[-1].split("@")[0] for line in output.splitlines()}
    # Sanitizers export symbols that libraries share.
    exported = {name for name in exported if not re.match(r"_+(asan|odr_asan|ubsan|tsan)", name)}

    for name in sorted(declared - exported):
        print(f"declared, but not exported: {name}")
    for name in sorted(exported - declared):
        print(f"exported, but not declared: {name}")
    if declared != exported or not declared:
        return 1
    print(f"{len(exported)} functions, all declared and exported")
    return 0


if __name__ == "__main__":
    sys.exit(main())
