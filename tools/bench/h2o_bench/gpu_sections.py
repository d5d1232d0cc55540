"""Section numbers in the results."""

from __future__ import annotations

from h2o_bench.records import GPU_SECTIONS

MACHINE, SCORES, PREFILL, GRID, LONG, PAPER, LARGE, PEERS = GPU_SECTIONS
