"""lm_eval's command with the model h2o_cpp: `python -m h2o_cpp.eval run --model h2o_cpp`."""

from lm_eval.__main__ import cli_evaluate

import h2o_cpp.eval.model  # noqa: F401  registers the model

cli_evaluate()
