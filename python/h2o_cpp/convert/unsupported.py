"""What unsupported models would need, for error messages."""

import re

_STATE = "which have a state instead of a KV cache"

# part of a name in `architectures` -> what such models need
_MISSING = {
    r"Mamba|Jamba|NemotronH|Bamba|FalconH1|Zamba|Plamo2": (
        f"layers of a state-space model (Mamba), {_STATE}"
    ),
    r"KimiLinear": f"layers of linear attention, {_STATE}",
    r"Rwkv|RWKV": f"layers of linear attention (RWKV), {_STATE}",
    r"DeepseekV[23]|MiniCPM3|KimiK2|GlmMoeDsa|Plm": (
        "multi-head latent attention (MLA), whose cache holds one compressed row for all heads"
    ),
    r"Llama4": "attention in chunks and temperatures of queries by position",
    r"HunYuan": "norms of q and k after their rotation",
    r"Apertus": "an activation with parameters of each layer (xIELU)",
    r"PhimoeFor|PhiMoE": "a router that drops experts far below the best (SparseMixer)",
    r"ConditionalGeneration|VLFor|VisionFor": "an encoder of pictures or sound, or of the prompt",
    r"Bert|RobertaFor|MaskedLM": "attention to later tokens (an encoder)",
}


def missing(architecture: str) -> str | None:
    """What a model of this Hugging Face class needs beyond what is supported; None if unknown."""
    for pattern, needs in _MISSING.items():
        if re.search(pattern, architecture):
            return needs
    return None
