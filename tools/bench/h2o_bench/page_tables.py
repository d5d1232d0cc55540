"""Tables between markers in a page."""

from __future__ import annotations

from pathlib import Path


def put_between(page: Path, name: str, table: str) -> None:
    """Replace the table between <!-- name --> and <!-- /name -->. Raises ValueError without
    markers."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"{page} has no markers {begin.strip()} and {end.strip()}")
    page.write_text(f"{before}{begin}{table}{end}{after}", encoding="utf-8")
