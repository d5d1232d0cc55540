"""Continue a text, piece by piece, with a cache of constant size.

python stream.py [MODEL] [PROMPT]
"""

import sys

from h2o_cpp import BUNDLED_MODEL, Generator

model = sys.argv[1] if len(sys.argv) > 1 else BUNDLED_MODEL
prompt = sys.argv[2] if len(sys.argv) > 2 else "The old man"

with Generator(model, hh=0.1) as generator:  # a tenth of the context: half heavy hitters
    print(prompt, end="")
    for piece in generator.stream(prompt, max_tokens=300, seed=1):
        print(piece, end="", flush=True)
    stats = generator.stats()
    print(f"\n\n{stats.tokens_seen} tokens read, {stats.tokens_kept} kept", end=" ")
    print(f"in {stats.cache_bytes} bytes; all would take {stats.full_cache_bytes}")
