"""Excludes tests whose requirements are missing (support/needs.py), with a line in the summary.

Collected tests pass or fail; skipping at run time is a failure. A pytest plugin, loaded by
conftest.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from support.needs import SHARED

NOT_COLLECTED = pytest.StashKey[Counter[str]]()  # by requirement


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOT_COLLECTED] = Counter[str]()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that calls pytest.importorskip has no tests if the package is missing."""
    report = yield
    if report.skipped:
        collector.config.stash[NOT_COLLECTED]["optional packages (files)"] += 1
        report.outcome, report.longrepr, report.result = "passed", None, []
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = []
    for item in items:
        missing = [mark.kwargs["reason"] for mark in item.iter_markers("skipif") if mark.args[0]]
        if "shared" in getattr(item, "fixturenames", ()) and not SHARED.is_dir():
            missing.insert(0, "shared models and texts (H2O_SHARED)")
        config.stash[NOT_COLLECTED].update(missing[:1])
        if not missing:
            kept.append(item)
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr}: skipped while it ran; say before what it needs"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """From a worker of pytest-xdist, which collects, to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        counts = session.config.stash[NOT_COLLECTED]
        session.config.workeroutput["not collected"] = dict(counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker has collected the same tests, so one report suffices."""
    counts: Counter[str] = node.config.stash[NOT_COLLECTED]
    if not counts:
        counts.update(getattr(node, "workeroutput", {}).get("not collected", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts = config.stash[NOT_COLLECTED].most_common()
    if counts:
        needs = ", ".join(f"{what} {count}" for what, count in counts)
        terminalreporter.write_line(f"not collected, by what they need: {needs}")
