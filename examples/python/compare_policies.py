"""Compare policies that keep 10% of a text by perplexity (lower is better).

python compare_policies.py [MODEL] [TEXT_FILE]
"""

import sys
from pathlib import Path

from h2o_cpp import BUNDLED_MODEL
from h2o_cpp.measure.budgets import Comparison
from h2o_cpp.measure.perplexity import measure
from h2o_cpp.model.session import open_model
from h2o_cpp.model.tokenizer import Tokenizer

STORY = """It was late in the evening when the old man came to the house by the sea. He had walked
all day, and he was tired, and he had not eaten since the morning. The door was open. He went in and
called, but there was no answer; only the clock went on, and the wind in the chimney. He sat down by
the fire, and looked at the picture of the ship on the wall, and waited for his son. """

model = open_model(sys.argv[1] if len(sys.argv) > 1 else BUNDLED_MODEL, device="auto", threads=None)
text = Path(sys.argv[2]).read_text(encoding="utf-8") if len(sys.argv) > 2 else STORY * 2
tokenizer = Tokenizer.of_model(model)
tokens = tokenizer.encode(text, add_special=False)

policies = ["h2o", "mean", "sinks", "window"]
n_ctx = min(len(tokens), model.n_ctx_train)
for row in measure(model, tokens, Comparison.of(policies, [0.1], n_ctx=n_ctx, n_batch=1)):
    print(f"{row.policy:8} {row.kept:5} tokens kept   perplexity {row.perplexity:8.2f}")
