"""A chat that never ends: its cache has 50 MB, it keeps its instructions and says what is lost.

python endless_chat.py [MODEL] [MEMORY]
"""

import sys

from h2o_cpp import BUNDLED_MODEL, Chat, Generator

INSTRUCTIONS = "You are a friendly assistant. Answer in one or two sentences."
# The bundled model has no chat template; a chat model's file has its own.
TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant:"""

model, memory, *_ = [*sys.argv[1:], *[BUNDLED_MODEL, "50MB"][len(sys.argv) - 1 :]]

# Keeps the tokens that matter most, as many as fit. Where a model's positions cannot go on, as
# those of the bundled one, the oldest turns are dropped instead.
with Generator(model, cache_memory=memory, n_ctx=0, max_sequences=1) as generator:
    template = None if generator.tokenizer.chat_template else TEMPLATE
    chat = Chat(
        generator, system=INSTRUCTIONS, protect="system", template=template, truncation="auto"
    )
    for line in sys.stdin:
        reply = chat.say(line.strip(), max_tokens=100, seed=1)
        for piece in reply:
            print(piece, end="", flush=True)
        shares = reply.prompt_memory.messages
        stats = generator.stats()
        print(
            f"\n[message {len(chat.messages)}: {stats.tokens_kept} tokens kept in "
            f"{stats.cache_bytes / 1e6:.2f} MB | instructions: {shares[0] or 0:.0%} kept | "
            f"{sum(not share for share in shares)} messages forgotten]"
        )
