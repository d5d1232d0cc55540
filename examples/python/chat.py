"""A conversation that keeps its cache between turns.

python chat.py [MODEL]
"""

import sys

from h2o_cpp import BUNDLED_MODEL, Chat, Generator

# The bundled model has no chat template; a chat model's file has its own (template=None).
TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant:"""

model = sys.argv[1] if len(sys.argv) > 1 else None

with Generator(model or BUNDLED_MODEL, hh=0.2) as generator:
    chat = Chat(generator, template=None if model else TEMPLATE)
    for line in sys.stdin:
        reply = chat.say(line.strip(), max_tokens=60, stop=["\n"], seed=1)
        for piece in reply:
            print(piece, end="", flush=True)
        print(f"\n[read {reply.prompt_tokens} new tokens of {len(reply.history)}]")
