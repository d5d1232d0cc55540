"""llama.cpp's flags without an equivalent option, and what to use instead."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from h2o_cpp.cli.output import tell

_ANSWERS = {
    "-cnv --conversation -no-cnv --no-conversation -st --single-turn -i --interactive "
    "-if --interactive-first": "use h2o-cpp chat to chat, h2o-cpp run to continue a text",
    "-ub --ubatch-size": "prompts are read --n-batch tokens at a time",
    "-tb --threads-batch": "--threads applies to prompts too",
    "-r --reverse-prompt": "--stop TEXT ends a text before TEXT",
    "-sys --system --system-prompt -sysf --system-prompt-file": "h2o-cpp chat has --system TEXT",
    "--in-prefix --in-prefix-bos --in-suffix": "h2o-cpp chat puts messages into --template",
    "--chat-template --chat-template-file": "h2o-cpp chat and serve have it",
    "--chat-template-kwargs --reasoning-format --reasoning-budget": "requests to h2o-cpp serve "
    "have chat_template_kwargs, such as enable_thinking",
    "-np --parallel": "h2o-cpp generate and serve have it, others compute one sequence",
    "-ns --sequences": "h2o-cpp generate continues many prompts",
    "-e --escape --no-escape": "texts are taken as they are, write $'one\\ntwo' in the shell",
    "-bf --binary-file": "--file takes UTF-8 text",
    "-sp --special": "special tokens are never printed",
    "--prompt-cache --prompt-cache-all --prompt-cache-ro --slot-save-path": "h2o-cpp chat has "
    "/save and /load, h2o-cpp serve has --prefix-cache-disk",
    "--cache-reuse": "h2o-cpp serve has --prefix-cache",
    "-gan --grp-attn-n -gaw --grp-attn-w": "rolling positions go past the trained length",
    "--numa -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll": "--threads says how many "
    "threads compute, numactl and taskset say where",
    "-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe": "--max-resident says how much of "
    "the weights stays on the device",
    "--list-devices": "nvidia-smi -L lists the GPUs of --device cuda:N",
    "--override-kv": "the file determines its metadata, which h2o-cpp info prints",
    "--rpc": "one machine computes all of it",
    "--control-vector --control-vector-scaled": "there are no control vectors",
    "-hft --hf-token": "set the environment variable HF_TOKEN",
    "-to --timeout": "h2o-cpp serve has --write-timeout and --keep-alive",
    "--api-key-file": "--api-key may be repeated, or set H2O_API_KEY",
    "--ssl-key-file --ssl-cert-file": "h2o-cpp serve has --tls-cert and --tls-key",
    "-hff --hf-file": "give the file as -m hf://OWNER/REPO/FILE",
    "-mu --model-url": "give a file that you downloaded, or -m hf://OWNER/REPO",
    "--keep --context-shift --no-context-shift": "--hh and --policy say what the cache keeps",
    "-sm --split-mode -ts --tensor-split -mg --main-gpu": "one device computes all of it: --device",
    "-nkvo --no-kv-offload -nocb --no-cont-batching --no-jinja --no-slots -lv --verbosity "
    "--log-verbosity --verbose-prompt --log-file --log-colors -co --color -mli --multiline-input "
    "--no-webui -nr --no-repack --threads-http -ptc --print-token-count --no-op-offload -dt "
    "--defrag-thold -dkvc --dump-kv-cache": "there is no such option here; omit it",
    "--lora --lora-scaled": "merge the adapter into its checkpoint, then use h2o-cpp convert",
    "--draft-min --draft-p-min": "the number of drafts follows from what they gain; omit it",
    "--mmproj -mm --image": "only text models are supported",
    "--embedding --embeddings": "h2o-cpp embed prints embeddings, h2o-cpp serve has /v1/embeddings",
    "--rerank --reranking": "h2o-cpp serve has /v1/rerank without a flag",
    "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
    "--yarn-ext-factor --yarn-attn-factor": "the file determines the rotation",
}

ANSWERS: Final = {flag: answer for flags, answer in _ANSWERS.items() for flag in flags.split()}

# These flags ask for what happens anyway.
_USUAL = {
    "-fa --flash-attn": "attention never stores its scores",
    "--mmap --no-mmap --mlock": "weights are mapped, and --max-resident says how many stay",
    "-v --verbose --log-verbose": "there is no log to make longer",
    "--log-disable --log-prefix --log-timestamps": "there is no log to change",
    "--metrics --slots --props": "the server has them",
    "-cb --cont-batching -kvu --kv-unified --jinja --warmup --no-warmup --no-perf --simple-io "
    "--offline --check-tensors --swa-full": "it works without",
}
REASONS: Final = {flag: reason for flags, reason in _USUAL.items() for flag in flags.split()}
_SWITCHES = ("-fa", "--flash-attn")  # with or without one of these
_ON_OR_OFF = ("on", "off", "auto", "1", "0", "true", "false", "enabled", "disabled")

_REPOSITORY = ("-hf", "-hfr", "--hf-repo")
_GPU_LAYERS = ("-ngl", "--n-gpu-layers", "--gpu-layers")


def translate(words: Sequence[str], known: Container[str]) -> list[str]:
    """Replace -hf OWNER/REPO by --model=hf://OWNER/REPO; omit flags without effect, such as -ngl N,
    with a note on stderr.

    known: the command's options.

    Raises ValueError for an unknown flag that has an answer, and for a flag without its value.
    """
    end = words.index("--") if "--" in words else len(words)
    following = iter(words[:end])
    previous = ""
    result: list[str] = []

    def value_of(flag: str, given: str, expected: str) -> str:
        value = given or next(following, "")
        if not value:
            raise ValueError(f"argument {flag}: expected {expected}")
        return value

    for word in following:
        flag, _, given = word.partition("=")
        is_switch = previous in _SWITCHES and word in _ON_OR_OFF
        previous = word
        if is_switch:
            continue
        if flag in ANSWERS and flag not in known:
            raise ValueError(f"{flag} is a llama.cpp flag: {ANSWERS[flag]}")
        if flag in _REPOSITORY and "--model" in known:
            result.append(f"--model=hf://{value_of(flag, given, 'OWNER/REPO')}")
        elif flag in _GPU_LAYERS and "--device" in known:
            tell(
                f"note: {flag} {value_of(flag, given, 'a number')} has no effect: --device (auto, "
                "cpu, cuda[:N] or vulkan[:N]) chooses where all layers are computed",
            )
        elif flag in REASONS and flag not in known:
            tell(f"note: {flag} has no effect: {REASONS[flag]}")
        else:
            result.append(word)
    return [*result, *words[end:]]
