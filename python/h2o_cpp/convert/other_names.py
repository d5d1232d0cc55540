"""Other names of tensors: those of transformers 5 and of MLX, where they differ from the Hub's, and
of BERT's first checkpoints."""

import re
from collections.abc import Iterator
from dataclasses import replace

from h2o_cpp.convert.modules import TensorSpec

# Names of an expert's matrices -> gate, up or down.
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_PARTS |= {"w1": "gate", "w3": "up", "w2": "down"}

_EXPERT = re.compile(r"(.*\.)(mlp|block_sparse_moe|feed_forward)\.experts\.\{\}\.(\w+)\.weight")

# A name on the Hub -> that of transformers 5, or of MLX.
_RENAMED = (
    (r"LayerNorm\.weight", "LayerNorm.gamma"),
    (r"LayerNorm\.bias", "LayerNorm.beta"),
    (r"block_sparse_moe\.gate\.weight", "mlp.gate.weight"),
    (r"block_sparse_moe\.e_score_correction_bias", "mlp.e_score_correction_bias"),
    (r"block_sparse_moe\.router\.layer\.weight", "block_sparse_moe.router.weight"),
    (r"block_sparse_moe\.input_linear\.weight", "block_sparse_moe.experts.gate_up_proj"),
    (r"block_sparse_moe\.output_linear\.weight", "block_sparse_moe.experts.down_proj"),
    (r"block_sparse_moe\.output_linear\.weight", "block_sparse_moe.switch_mlp.down_proj.weight"),
    (r"mlp\.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    (r"mlp\.moe_statics\.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    (
        r"mlp\.moe_statics\.e_score_correction_bias",
        "mlp.gate.moe_statics.e_score_correction_bias",
    ),
)


def other_specs(spec: TensorSpec) -> Iterator[TensorSpec]:
    """The same tensor under its other names, with the shape that belongs to each."""
    if match := _EXPERT.fullmatch(spec.hf):
        layer, module, name = match.groups()
        yield from _all_experts(spec, layer, module, _PARTS[name])
        if module != "mlp":
            yield from _all_experts(spec, layer, "mlp", _PARTS[name])
    for pattern, other in _RENAMED:
        if (renamed := re.sub(pattern + "$", other, spec.hf)) != spec.hf:
            yield replace(spec, hf=renamed)
    if spec.hf.endswith("block_sparse_moe.input_linear.weight") and spec.rows is not None:
        part = "gate" if spec.rows[0] == 0 else "up"
        shape = (*spec.shape[:1], spec.rows[1] - spec.rows[0], *spec.shape[2:])
        hf = spec.hf.replace("input_linear", f"switch_mlp.{part}_proj")
        yield replace(spec, hf=hf, shape=shape, rows=None)


def _all_experts(spec: TensorSpec, layer: str, module: str, part: str) -> Iterator[TensorSpec]:
    """All experts in one tensor; in transformers 5 gate and up, too."""
    rows, columns = spec.shape
    whole = replace(spec, stack=0, shape=(spec.stack, rows, columns))
    yield replace(whole, hf=f"{layer}{module}.switch_mlp.{part}_proj.weight")
    if part == "down":
        yield replace(whole, hf=f"{layer}{module}.experts.down_proj")
        return
    first = 0 if part == "gate" else rows
    yield replace(
        whole,
        hf=f"{layer}{module}.experts.gate_up_proj",
        shape=(spec.stack, 2 * rows, columns),
        rows=(first, first + rows),
    )
