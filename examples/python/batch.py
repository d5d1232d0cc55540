"""Continue several prompts at once, as many as have caches in the given memory.

python batch.py [MODEL]
"""

import sys

from h2o_cpp import BUNDLED_MODEL, Generator, capacity

MEMORY = "20MiB"  # suffices for a tiny model
PROMPTS = ["The old man", "It was a dark night", "She opened the letter", "At sea,"]

model = sys.argv[1] if len(sys.argv) > 1 else BUNDLED_MODEL
print(f"{capacity(model, MEMORY)} full caches fit in {MEMORY},", end=" ")
print(f"{capacity(model, MEMORY, hh=0.1)} of a tenth\n")

with Generator(model, hh=0.1, memory=MEMORY) as generator:
    texts = [""] * len(PROMPTS)
    for i, piece in generator.stream_many(PROMPTS, max_tokens=40, seed=1):
        texts[i] += piece  # in any order
for prompt, text in zip(PROMPTS, texts, strict=True):
    print(f"{prompt}{text}\n")
