"""Measurements of h2o.cpp, and of other engines beside it."""

import sys
from pathlib import Path

# Models are made by the tests' support.
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "python"))
