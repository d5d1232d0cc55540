"""Interrupt a stream, save it to a file, and continue it later, exactly.

python snapshot.py [MODEL]
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from h2o_cpp import BUNDLED_MODEL, Generator

model = sys.argv[1] if len(sys.argv) > 1 else BUNDLED_MODEL

with TemporaryDirectory() as folder:
    file = Path(folder) / "text.snapshot"
    with Generator(model, hh=40) as generator:
        stream = generator.stream("The old man", max_tokens=60, seed=1, ignore_eos=True)
        first = "".join(stream)
        stream.save(file)  # text, cache and random state
        whole = generator.generate("The old man", max_tokens=120, seed=1, ignore_eos=True).text
    with Generator(model, hh=40) as generator:  # later, in another program
        after = generator.load(file)
        rest = generator.generate("", after=after, max_tokens=60, ignore_eos=True).text
    print(f"{file.stat().st_size} bytes\n\nThe old man{first}|{rest}\n")
    print("the same as without a stop:", first + rest == whole)
