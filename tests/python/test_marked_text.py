"""Text that knows where its characters are from: it has str's text, and marks only what is own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_cpp.model.marked_text import TEMPLATE, MarkedText, checked, joined, runs

# The letters tell where a character is from.
OWN, GIVEN = "xyz", "abc"
ALSO = " \n\r\t_%\u2028"

own = st.text(f"{OWN}XYZ{ALSO}", max_size=5).map(lambda text: MarkedText(text, TEMPLATE))
values = st.text(f"{GIVEN}ABC{ALSO}", max_size=5)
mixed = st.lists(st.one_of(own, values), max_size=4).map(joined)
texts = st.one_of(mixed, mixed, own, values, st.sampled_from(["", " ", "_", "a"]))
number = st.integers(-7, 7)
Operation = Callable[[Any, Any, Any, int], Any]


def plain(value: Any) -> Any:
    """The same without marks."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value


def check(found: Any, expected: Any, *, complete: bool) -> None:
    """The same text, in which only the template's letters are marked; complete: all of them."""
    if isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other, complete=complete)
        return
    assert found == expected
    assert type(expected) is str
    origins = [origin for origin, length in runs(found) for _ in range(length)]
    for origin, c in zip(origins, found.lower(), strict=True):
        assert c not in GIVEN or origin != TEMPLATE
        assert c not in OWN or origin == TEMPLATE or not complete


# Every operation on a marked text.
OPERATIONS: dict[str, Operation] = {
    "sum": lambda a, b, c, n: a + b + c,
    "product": lambda a, b, c, n: [a * n, n * a],
    "join": lambda a, b, c, n: a.join([b, c, a][: max(n, 0)]),
    "join characters": lambda a, b, c, n: a.join(b),
    "replace": lambda a, b, c, n: [a.replace(b or "x", c), a.replace(b or " ", c, n)],
    "split": lambda a, b, c, n: [a.split(), a.split(None, n), a.split(sep=None, maxsplit=n)],
    "split at": lambda a, b, c, n: [a.split(b or "_"), a.split(b or "x", n), a.split(sep="__")],
    "rsplit": lambda a, b, c, n: [a.rsplit(), a.rsplit(None, n), a.rsplit(b or "_", n)],
    "lines": lambda a, b, c, n: [a.splitlines(), a.splitlines(True), a.splitlines(keepends=True)],
    "partition": lambda a, b, c, n: [a.partition(b or " "), a.rpartition(b or " ")],
    "strip": lambda a, b, c, n: [a.strip(), a.lstrip(), a.rstrip()],
    "strip characters": lambda a, b, c, n: [a.strip(b), a.lstrip(b), a.rstrip(b)],
    "remove": lambda a, b, c, n: [(a + b).removesuffix(b), (a + b).removeprefix(a)],
    "remove others": lambda a, b, c, n: [a.removesuffix(b), a.removeprefix(b)],
    "item": lambda a, b, c, n: (a + "abcdefg")[n],
    "slice": lambda a, b, c, n: [a[n:], a[:n], a[::-1], a[1:-1], a[:: n or 1]],
    "characters": lambda a, b, c, n: [*a, *reversed(a)],
    "case": lambda a, b, c, n: [a.lower(), a.upper(), a.capitalize(), a.title()],
    "str": lambda a, b, c, n: str(a),
}
# Without marks where text is padded, formatted or longer than before.
PARTIAL: dict[str, Operation] = {
    "replace nothing": lambda a, b, c, n: a.replace("", b),
    "longer": lambda a, b, c, n: [(a + "\u00df").upper(), (a + "\u0130").lower()],
    "padded": lambda a, b, c, n: [a.center(9), a.ljust(9, "_"), a.zfill(9), a.expandtabs()],
}
# Formats with a, b and c.
PERCENT = ["%s", "x%sy%s%%%s", "%5s%-5s%.1s", "%r%a%s", "%s%c%d", "%(_)s%(b)s", "%(_)5s%%", "%*d"]


@pytest.mark.parametrize("name", [*OPERATIONS, *PARTIAL])
@given(mixed, texts, texts, number)
def test_marks_follow_the_text(name: str, a: str, b: str, c: str, n: int) -> None:
    operation = (OPERATIONS | PARTIAL)[name]
    a = MarkedText(a) if type(a) is str else a
    found, expected = operation(a, b, c, n), operation(plain(a), plain(b), plain(c), n)
    check(found, expected, complete=name in OPERATIONS)


@given(st.sampled_from(PERCENT), texts, texts, texts, number)
def test_formats(form: str, a: str, b: str, c: str, n: int) -> None:
    given_values: Any = (a, b, c)[: form.count("%") - 2 * form.count("%%")]
    if "%c" in form:
        given_values = (a, "x", n)
    elif "%*" in form:
        given_values = (9, n)
    elif "(" in form:
        given_values = {"_": a, "b": b}
    expected = form % given_values
    found = MarkedText(form, TEMPLATE) % given_values
    check(found, plain(expected), complete=form in PERCENT[:2])


def test_errors_are_those_of_str() -> None:
    operations: list[Callable[[Any], Any]] = [
        lambda a: a + 1,
        lambda a: a + [1],  # noqa: RUF005
        lambda a: 1 + a,
        lambda a: [1] + a,  # noqa: RUF005
        lambda a: a * 1.5,
        lambda a: a * "a",
        lambda a: a - a,
        lambda a: a[9],
        lambda a: a["a"],
        lambda a: a.x,
        lambda a: a.join(1),
        lambda a: a.join(["a", 1]),
        lambda a: a.replace("a"),
        lambda a: a.split(""),
        lambda a: a.split(1),
        lambda a: a.partition(""),
        lambda a: a.strip(1),
        lambda a: (a + "%d") % "a",
        lambda a: (a + "%s%s") % "a",
        lambda a: (a + "%(a)s") % {},
        lambda a: (a + "%") % 1,
        lambda a: a < 1,
    ]
    for operation in operations:
        with pytest.raises((TypeError, LookupError, ValueError, AttributeError)) as expected:
            operation("a")
        with pytest.raises(expected.type) as found:
            operation(MarkedText("a", TEMPLATE))
        assert str(found.value) == str(expected.value)


def test_marks_need_the_same_text() -> None:
    assert runs(checked("ab", [MarkedText("ab", TEMPLATE)])) == [(TEMPLATE, 2)]
    assert type(checked("ab", [MarkedText("ba", TEMPLATE)])) is str
