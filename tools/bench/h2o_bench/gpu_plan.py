"""The plan of GPU measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """What to measure, and how much."""

    copy_bytes: int = 1 << 32
    matmul_size: int = 8192
    changes: Mapping[str, int] = field(default_factory=dict)  # for every config
    rounds: int = 3
    # Decode
    shapes: Sequence[str] = ("OPT-6.7B", "LLaMA-7B", "LLaMA-3-8B")
    types: Sequence[str] = ("F16", "Q8_0", "Q4_K_M")
    baselines: bool = True
    context: int = 128
    n_decode: int = 128
    # Eviction and scores, in F16
    shape: str = "OPT-6.7B"
    prompt: int = 2048
    n_generate: int = 2048
    share: float = 0.2
    batches: Sequence[int] = (1, 8, 24, 64)
    equal_to: int = 24  # the batch whose full cache defines the memory for bounded caches
    whole: Sequence[int] = (24,)  # batches whose every step is measured
    n_sample: int = 64  # for others: steps measured at the beginning, middle and end
    slots: Sequence[int] = (128, 819, 4096)
    slots_batches: Sequence[int] = (1, 8)
    n_steps: int = 160
    # Prefill
    models: Sequence[tuple[str, str]] = (
        ("OPT-6.7B", "F16"),
        ("LLaMA-3-8B", "F16"),
        ("LLaMA-3-8B", "Q4_K_M"),
    )
    prompts: Sequence[int] = (2048, 8192)

    @property
    def n_positions(self) -> int:
        """Positions that models must have."""
        longest = self.prompt + self.n_generate, max(self.slots) + 2 * self.n_steps
        return max(*longest, *self.prompts) + 64


# A quick check on any machine, and on an emulated GPU: of the shapes only the architecture is left.
QUICK = Plan(
    copy_bytes=1 << 24,
    matmul_size=256,
    changes={
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    rounds=1,
    shapes=("OPT-1.3B", "SmolLM2-135M"),
    types=("F16", "Q4_K_M"),
    context=16,
    n_decode=8,
    shape="OPT-1.3B",
    prompt=12,
    n_generate=8,
    batches=(1, 3),
    equal_to=3,
    whole=(3,),
    n_sample=2,
    slots=(16,),
    slots_batches=(1, 2),
    n_steps=8,
    models=(("SmolLM2-135M", "F16"),),
    prompts=(20, 40),
)
