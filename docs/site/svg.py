"""What the pictures are drawn with: SVG that is readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WIDTH = 520  # narrow, so that letters stay readable on a phone

_STYLE = """
:root { --ink: #1f2328; --dim: #656d76; --card: #ffffff; --line: #d0d7de; --cell: #eef1f4;
  --heavy: #b85c00; --recent: #217a36; --sink: #0b7285; --full: #7a5af5; --on: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --dim: #9aa4af; --card: #161b22; --line: #3d444d; --cell: #262c34;
    --heavy: #f5a742; --recent: #51cf66; --sink: #3bc9db; --full: #a594f9; --on: #10151b; } }
text { font: 13px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: var(--ink); }
.dim { fill: var(--dim); } .small { font-size: 11.5px; } .strong { font-weight: 600; }
.on { fill: var(--on); font-weight: 600; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
"""


def picture(title: str, height: float, parts: Iterable[str]) -> str:
    """A whole picture; `title` is what it says, for those who cannot see it."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f"{rect(0.5, 0.5, WIDTH - 1, height - 1, 'var(--card)', radius=8, line='var(--line)')}\n"
        f"{body}\n</svg>\n"
    )


def text(x: float, y: float, said: str, style: str = "") -> str:
    """Words; `style` are classes."""
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(said)}</text>'


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    radius: float = 0,
    line: str = "none",
    opacity: float = 1,
    dash: str = "",
) -> str:
    """A rectangle."""
    more = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'style="fill: {fill}; stroke: {line}; opacity: {opacity:g}"{more}/>'
    )


def path(points: Iterable[tuple[float, float]], color: str, *, width: float = 2) -> str:
    """A line through points."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{joined}" '
        f'style="fill: none; stroke: {color}; stroke-width: {width:g}"/>'
    )
