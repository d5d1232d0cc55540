"""Offline jobs with Ray Data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from h2o_cpp.generation.request import StreamOptions
from h2o_cpp.generator import Generator
from h2o_cpp.jobs import continue_rows, line_seed, text_fields
from h2o_cpp.ray.options import actor_options

_COLUMNS = {
    "text": pa.string(),
    "finish_reason": pa.string(),
    "prompt_tokens": pa.int64(),
    "completion_tokens": pa.int64(),
    "error": pa.string(),
}


class Continue:
    """A stage for Dataset.map_batches with batch_format="pyarrow" that continues prompts."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        field: str = "prompt",
        index: str | None = None,
        seed: int | None = None,
        options: StreamOptions | None = None,
        **generator: Any,
    ) -> None:
        """Arguments as for generate(). Raises as Generator does."""
        _check_seed(seed, index)
        self._field, self._index, self._seed = field, index, seed
        self._options: StreamOptions = options or {}
        self._generator = Generator(model, **generator)
        self._generator.request([0], **self._options)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The rows with their outputs. Raises ValueError for missing or existing columns."""
        for name in (self._field, self._index):
            if name is not None and name not in batch.column_names:
                raise ValueError(
                    f"there is no column {name!r}, expected one of {batch.column_names}"
                )
        for name in _COLUMNS:
            if name in batch.column_names:
                raise ValueError(f"the column {name!r} already exists, rename it")
        found: list[dict[str, Any]] = [{} for _ in range(batch.num_rows)]
        for row, generation in continue_rows(
            self._generator,
            self._rows(batch),
            report=lambda row, reason: found[row].update(error=reason),
            options=self._options,
        ):
            found[row] = text_fields(generation)
        for name, kind in _COLUMNS.items():
            values = pa.array([fields.get(name) for fields in found], kind)
            batch = batch.append_column(name, values)
        return batch

    def _rows(self, batch: pa.Table) -> Iterator[tuple[int, Any, StreamOptions]]:
        """(row, prompt, options) for each row."""
        prompts = batch[self._field].to_pylist()
        numbers = range(len(prompts)) if self._index is None else batch[self._index].to_pylist()
        for row, (prompt, number) in enumerate(zip(prompts, numbers, strict=True)):
            yield row, prompt, {"seed": line_seed(self._seed, number)}


def generate(
    dataset: Dataset,
    model: str | os.PathLike[str],
    *,
    field: str = "prompt",
    index: str | None = None,
    seed: int | None = None,
    options: StreamOptions | None = None,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 64,
    num_cpus: float = 1,
    num_gpus: float = 0,
    **generator: Any,
) -> Dataset:
    """Continue the prompt of every row, in actors that load the model.

    Adds the columns `text`, `finish_reason`, `prompt_tokens` and `completion_tokens`, as in the
    output of `h2o-cpp generate`. For an invalid prompt they are null, and `error` has the reason.
    The batches of a failed actor are computed again, so each row occurs once.

    dataset: its column `field` has strings or lists of token ids.
    model: as for Generator; must exist on every node.
    index: a column of integers, required with `seed`. A row's seed is derived from both, as for
        line `index`, from 0, of `h2o-cpp generate --seed`.
    options: of Generator.stream, except the seed.
    concurrency: the number of actors, or (minimum, maximum).
    batch_size: rows per batch; should be several times `max_sequences`, because the end of a batch
        has fewer concurrent sequences.
    num_cpus, num_gpus: per actor; sets its threads, and the device if it has a GPU.
    generator: options of Generator.

    Raises ValueError for a seed without index. Ray raises errors of actors when it runs them.
    """
    _check_seed(seed, index)
    low, high = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    return dataset.map_batches(
        Continue,
        fn_constructor_args=(os.fspath(model),),
        fn_constructor_kwargs={
            "field": field,
            "index": index,
            "seed": seed,
            "options": options,
            **actor_options(num_cpus, num_gpus, generator),
        },
        compute=ActorPoolStrategy(min_size=low, max_size=high),
        batch_size=batch_size,
        batch_format="pyarrow",
        num_cpus=num_cpus,
        num_gpus=num_gpus or None,
    )


def _check_seed(seed: int | None, index: str | None) -> None:
    if seed is not None and index is None:
        raise ValueError("seed needs index, the name of the column with row numbers")
