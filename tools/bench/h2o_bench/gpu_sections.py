"""Section numbers in the results; the page and the command line count from 0."""

from __future__ import annotations

from h2o_bench.records import GPU_SECTIONS

MACHINE, DECODE, EVICTION, SCORES, PREFILL, GRID, LONG, PAPER, PEERS, LARGE = GPU_SECTIONS
