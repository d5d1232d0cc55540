"""llama.cpp's flags without an equivalent option, and what to use instead."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

_ANSWERS = {
    "-cnv --conversation -no-cnv --no-conversation -st --single-turn -i --interactive "
    "-if --interactive-first": "use h2o-cpp chat to chat, h2o-cpp run to continue a text",
    "-ub --ubatch-size": "prompts are read --n-batch tokens at a time",
    "-tb --threads-batch": "--threads applies to prompts too",
    "-r --reverse-prompt": "--stop TEXT ends a text before TEXT",
    "-hff --hf-file": "give the file as -m hf://OWNER/REPO/FILE",
    "-mu --model-url": "give a file that you downloaded, or -m hf://OWNER/REPO",
    "--keep --context-shift --no-context-shift": "--hh and --policy say what the cache keeps",
    "-sm --split-mode -ts --tensor-split -mg --main-gpu": "one device computes all of it: --device",
    "-fa --flash-attn --mlock --mmap --no-mmap -nkvo --no-kv-offload -kvu --kv-unified "
    "-cb --cont-batching -nocb --no-cont-batching --jinja --no-jinja --warmup --no-warmup "
    "--metrics --slots --no-slots --props": "there is no such option here; omit it",
    "--lora --lora-scaled": "merge the adapter into its checkpoint, then use h2o-cpp convert",
    "-md --model-draft --draft --draft-max --draft-min": "there is no speculative decoding",
    "--mmproj -mm --image": "only text models are supported",
    "--embedding --embeddings": "h2o-cpp embed prints embeddings, h2o-cpp serve has /v1/embeddings",
    "--rerank --reranking": "there is no reranking",
    "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
    "--yarn-ext-factor --yarn-attn-factor": "the file determines the rotation",
}

ANSWERS: Final = {flag: answer for flags, answer in _ANSWERS.items() for flag in flags.split()}

_REPOSITORY = ("-hf", "-hfr", "--hf-repo")


def translate(words: Sequence[str], known: Container[str]) -> list[str]:
    """Replace -hf OWNER/REPO by -m hf://OWNER/REPO; `known`: the command's options.

    Raises ValueError for an unknown flag that has an answer.
    """
    end = words.index("--") if "--" in words else len(words)
    result = list(words)
    for i, word in enumerate(words[:end]):
        flag, equals, value = word.partition("=")
        if flag in known:
            continue
        if flag in ANSWERS:
            raise ValueError(f"{flag} is a llama.cpp flag: {ANSWERS[flag]}")
        if flag in _REPOSITORY and "-m" in known:
            if equals:
                result[i] = f"--model=hf://{value}"
            elif i + 1 < end:
                result[i : i + 2] = ["-m", f"hf://{words[i + 1]}"]
    return result
