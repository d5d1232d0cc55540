"""Prints commands for CTest that make each case of a doctest program a test, "FILE: CASE".

python3 list_cases.py SKIPPED PROGRAM [OPTION...]
SKIPPED is the program's exit status where it cannot run.
"""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree


def quoted(argument: str) -> str:
    return f"[==[{argument}]==]"


def add_test(name: str, command: list[str], properties: dict[str, str]) -> None:
    print("add_test(", *map(quoted, [name, *command]), ")")
    both = [word for pair in properties.items() for word in pair]
    print("set_tests_properties(", quoted(name), "PROPERTIES", *map(quoted, both), ")")


def list_cases(skipped: str, command: list[str]) -> None:
    listing = [*command, "--list-test-cases", "--no-skip", "--reporters=xml"]
    try:
        output = subprocess.run(listing, check=True, stdout=subprocess.PIPE).stdout
    except (OSError, subprocess.CalledProcessError):  # not built, or cannot run: the test says it
        add_test("h2o_tests", listing, {"SKIP_RETURN_CODE": skipped})
        return
    for case in ElementTree.fromstring(output).iter("TestCase"):
        name = case.attrib["name"]
        file = re.split(r"[/\\]", case.attrib["filename"])[-1]
        # A comma would separate two filters; a backslash or a quotation mark may escape one.
        filters = [f"--source-file=*{file}", "--test-case=" + re.sub(r'[,\\"]', "?", name)]
        # That nothing matches is a failure, unless the case is skipped on this device.
        key = "SKIP" if case.attrib["skipped"] == "true" else "FAIL"
        add_test(
            f"{file.removesuffix('.cpp')}: {name}",
            [*command, *filters],
            {f"{key}_REGULAR_EXPRESSION": "test cases: +0 "},
        )


list_cases(sys.argv[1], sys.argv[2:])
