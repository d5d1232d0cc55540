"""The plan of GPU measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from h2o_bench.engine_names import LLAMA_CPP, OURS, TORCH


class Grid(NamedTuple):
    """A model, and the contexts after which it decodes one and many sequences."""

    shape: str
    type_name: str
    alone: Sequence[int]
    together: Sequence[int]


class Generation(NamedTuple):
    """Prompts and outputs of a length in batches of several sizes.

    equal_to: batches whose full cache is as large as that of a bounded batch to measure.
    """

    prompt: int
    generated: int
    batches: Sequence[int]
    equal_to: Sequence[int] = ()


class Paper(NamedTuple):
    """A model of the paper's experiment; offload: most weights stay in host memory."""

    shape: str
    type_name: str
    offload: bool
    generations: Sequence[Generation]


class Torch(NamedTuple):
    """A shape in transformers: (prompt, generated, batch), with or without Accelerate's offload."""

    shape: str
    resident: Sequence[tuple[int, int, int]]
    offloaded: Sequence[tuple[int, int, int]] = ()


_ALL = (128, 2048, 8192, 32768)
_SHORT = (128, 2048)
_GRID = (
    Grid("LLaMA-3-8B", "Q4_K_M", _ALL, _ALL),
    Grid("LLaMA-7B", "F16", _ALL, _ALL),
    Grid("LLaMA-7B", "Q4_K_M", _ALL, _SHORT),
    Grid("LLaMA-7B", "Q8_0", _ALL, _SHORT),
    Grid("OPT-6.7B", "F16", _ALL, _SHORT),
    Grid("LLaMA-3-8B", "F16", _ALL, _SHORT),
    Grid("GPT-NeoX-20B", "Q4_K_M", (128, 2048, 8192), (128,)),
    # As time allows
    Grid("LLaMA-3-8B", "Q8_0", _SHORT, (128,)),
    Grid("OPT-6.7B", "Q8_0", _SHORT, (128,)),
    Grid("OPT-6.7B", "Q4_K_M", _SHORT, (128,)),
    Grid("GPT-NeoX-20B", "Q8_0", _SHORT, (128,)),
    Grid("GPT-NeoX-20B", "F16", _SHORT, (128,)),
)
_PAPER = (
    Paper(
        "OPT-6.7B",
        "F16",
        False,
        (
            Generation(512, 1024, (4, 16, 64), (16, 64)),
            Generation(2048, 2048, (24, 64)),
            Generation(512, 512, (64,), (64,)),
            Generation(512, 32, (64,), (64,)),
            Generation(7000, 1024, (4,), (4,)),
        ),
    ),
    Paper("OPT-6.7B", "F16", True, (Generation(512, 1024, (16,), (16,)),)),
    Paper("OPT-30B", "Q4_K_M", False, (Generation(7000, 1024, (1,), (1,)),)),
)
# The larger model of the paper, as the paper ran it; a file of 60 GB.
_LARGE = (
    Paper("OPT-30B", "F16", True, (Generation(512, 512, (8,), (40,)),)),
    Paper("OPT-30B", "F16", False, (Generation(7000, 1024, (1,)),)),
)


@dataclass(frozen=True)
class Plan:
    """What to measure, and how much."""

    copy_bytes: int = 1 << 32
    matmul_size: int = 8192
    changes: Mapping[str, int] = field(default_factory=dict)  # for every config
    rounds: int = 3
    engines: Sequence[str] = (OURS, LLAMA_CPP, TORCH)  # of the paper's experiment and peers
    share: float = 0.2  # of a context, that bounded caches keep
    # What scores cost, in F16
    shape: str = "OPT-6.7B"
    slots: Sequence[int] = (128, 819, 4096)
    slots_batches: Sequence[int] = (1, 8)
    n_steps: int = 160
    # Every shape: decode by context and batch, prefill
    grid: Sequence[Grid] = _GRID
    together: int = 24
    fixed: int = 1024  # slots
    n_batch: int = 8192  # tokens read in one pass
    n_warm: int = 4  # steps before those that count
    n_timed: int = 24
    grid_prompts: Sequence[int] = (512, 2048, 8192)
    most_seconds: float = 8.0  # for reading the context of a cell
    # A long text
    long_model: tuple[str, str] = ("LLaMA-3-8B", "Q4_K_M")
    long: Sequence[int] = (1000, 10000, 100000)
    # The paper's experiment
    paper: Sequence[Paper] = _PAPER
    large: Sequence[Paper] = _LARGE
    read_together: int = 2048  # prompt tokens in one pass, with weights in device memory
    n_paper: int = 16  # steps at the beginning, in the middle and at the end
    n_offloaded: int = 4
    torch: Sequence[Torch] = (
        Torch(
            "OPT-6.7B",
            (
                *((512, 1024, batch) for batch in (4, 16, 64)),
                (512, 512, 64),
                (512, 32, 64),
                (2048, 2048, 24),
            ),
            ((512, 1024, 16),),
        ),
    )
    torch_large: Sequence[Torch] = (Torch("OPT-30B", (), ((512, 512, 8),)),)
    # llama.cpp and transformers
    peers: Sequence[tuple[str, str]] = (
        ("LLaMA-7B", "Q4_K_M"),
        ("LLaMA-7B", "F16"),
        ("LLaMA-3-8B", "Q4_K_M"),
        ("LLaMA-7B", "Q8_0"),
        ("LLaMA-3-8B", "F16"),
    )
    peer_alone: Sequence[int] = (128, 2048, 8192)
    peer_together: Sequence[int] = (128, 2048)
    peer_steps: int = 64
    peer_torch: Sequence[str] = ("LLaMA-7B",)

    def only(self, shapes: Sequence[str] | None, types: Sequence[str] | None) -> Plan:
        """The grid, the paper's models and the peers of these shapes and types."""

        def wanted(one: tuple[object, ...]) -> bool:
            return (shapes is None or one[0] in shapes) and (types is None or one[1] in types)

        return replace(
            self,
            grid=[one for one in self.grid if wanted(one)],
            paper=[one for one in self.paper if wanted(one)],
            peers=[one for one in self.peers if wanted(one)],
            torch=[one for one in self.torch if shapes is None or one.shape in shapes],
            peer_torch=[one for one in self.peer_torch if shapes is None or one in shapes],
        )

    @property
    def n_positions(self) -> int:
        """Positions that models must have."""
        longest = [max(self.slots) + 2 * self.n_steps, *self.grid_prompts]
        longest += [n for grid in self.grid for n in (*grid.alone, *grid.together)]
        for paper in (*self.paper, *self.large):
            longest += [one.prompt + one.generated for one in paper.generations]
        return max(longest) + self.n_warm + self.n_timed + 64

    @property
    def n_long(self) -> int:
        """Positions for a long text."""
        return max(self.long) + len(self.long) * (self.n_warm + 3 * self.n_timed) + 64


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
    shape="OPT-1.3B",
    slots=(16,),
    slots_batches=(1, 2),
    n_steps=8,
    grid=(
        Grid("SmolLM2-135M", "Q4_K_M", (16, 40), (16, 40)),
        Grid("OPT-1.3B", "F16", (16,), (16,)),
    ),
    together=3,
    fixed=24,
    n_batch=32,
    n_warm=1,
    n_timed=3,
    grid_prompts=(20,),
    long_model=("SmolLM2-135M", "Q4_K_M"),
    long=(20, 60),
    paper=(
        Paper("OPT-1.3B", "F16", False, (Generation(16, 20, (1, 3), (3,)),)),
        Paper("OPT-1.3B", "F16", True, (Generation(16, 8, (2,), (2,)),)),
    ),
    large=(Paper("OPT-1.3B", "Q4_K_M", True, (Generation(16, 8, (1,)),)),),
    read_together=32,
    n_paper=2,
    n_offloaded=2,
    torch=(Torch("OPT-1.3B", ((16, 20, 1), (16, 20, 3)), ((16, 20, 2),)),),
    torch_large=(Torch("OPT-1.3B", (), ((16, 8, 1),)),),
    peers=(("SmolLM2-135M", "Q4_K_M"),),
    peer_alone=(16,),
    peer_together=(16,),
    peer_steps=4,
    peer_torch=("SmolLM2-135M",),
)
