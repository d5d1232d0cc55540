"""The runtime of a Generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from h2o_cpp import _core
from h2o_cpp.budget.policy import Policy
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.model.device import model_and_cache_bytes, open_on_device
from h2o_cpp.model.draft_model import open_draft_model, open_lossless_drafts, open_predictor
from h2o_cpp.model.session import open_model
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.options import GeneratorOptions


class Runtime(NamedTuple):
    """A loaded model with its engine and tokenizer."""

    model: _core.Model
    engine: _core.Engine
    tokenizer: Tokenizer
    policy: Policy | Sequence[Policy]  # one for all layers, or one per layer
    has_archive: bool  # of evicted tokens
    n_sequences: int  # maximum at once
    pooling_type: int  # which hidden state is the embedding, in GGUF's numbers


def open_runtime(file: ModelFile, options: GeneratorOptions) -> Runtime:
    """Load a model. Errors as for Generator."""
    return open_on_device(
        options.device,
        lambda device: _open_on(device, file, options),
        lambda: model_and_cache_bytes(file, options, options.resident_bytes),
    )


def _open_on(device: str, file: ModelFile, options: GeneratorOptions) -> Runtime:
    model = open_model(
        file,
        device=device,
        threads=options.threads,
        max_resident=options.max_resident,
        exact=options.exact,
    )
    cache = drafting = options.for_model(file)
    each = cache.slab_bytes(file)
    if options.lossless:
        cache = replace(cache, policy=Policy.full())
        each += cache.slab_bytes(file)
    session = cache.core()
    n_sequences, session.n_sequences = options.sequences(each, options.rows_on(device))
    session.max_sequences = n_sequences
    session.max_drafts = options.max_drafts_of(file)
    tokenizer = Tokenizer.of_model(model)
    drafts = None
    if options.lossless:
        drafts = open_lossless_drafts(
            model, drafting, n_texts=n_sequences, max_drafts=session.max_drafts
        )
    elif options.draft == "mtp":
        drafts = open_predictor(model, file, options, n_ctx=cache.context, n_texts=n_sequences)
    elif options.draft_model is not None:
        drafts = open_draft_model(file, device, options, n_ctx=cache.context, n_texts=n_sequences)
    engine = _core.Engine(model, tokenizer.core, session, options.prefixes(), drafts)
    architecture = file.metadata["general.architecture"]
    pooling_type = file.metadata.get(f"{architecture}.pooling_type", 1)
    return Runtime(
        model, engine, tokenizer, cache.policies, cache.archive is not None, n_sequences,
        pooling_type,
    )  # fmt: skip
