"""Modified copies of GGUF files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray


def changed(
    source: Path,
    target: Path,
    keys: Mapping[str, tuple[Any, GGUFValueType]],
    tensors: Mapping[str, NDArray[np.float32]],
    architecture: str | None = None,
) -> Path:
    """Copy `source` to `target` with changed or added metadata and tensors; returns `target`.

    `architecture`: the new one, also in the names of keys.
    """
    file = GGUFReader(source)
    old = file.fields["general.architecture"].contents()
    with closing(GGUFWriter(target, architecture or old)) as writer:
        for key, field in file.fields.items():
            if not key.startswith(("GGUF.", "general.architecture")) and key not in keys:
                sub_type = field.types[1] if len(field.types) > 1 else None
                name = re.sub(rf"^{old}\.", f"{architecture or old}.", key)
                writer.add_key_value(name, field.contents(), field.types[0], sub_type)
        for key, (value, kind) in keys.items():
            writer.add_key_value(key, value, kind)
        for tensor in file.tensors:
            if tensor.name not in tensors:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return target
