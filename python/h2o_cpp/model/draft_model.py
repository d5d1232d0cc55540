"""Models that propose what others generate."""

from __future__ import annotations

from h2o_cpp import _core
from h2o_cpp.arguments import short
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.model.session import open_model
from h2o_cpp.options import CacheOptions, GeneratorOptions

_TOKENS = "tokenizer.ggml.tokens"


def open_draft_model(
    larger: ModelFile, device: str, options: GeneratorOptions, *, n_ctx: int, n_texts: int
) -> _core.DraftModel:
    """Load `options.draft_model`; its cache keeps `options.draft_tokens` tokens of each text.

    larger: the model that verifies its proposals, in contexts of n_ctx tokens.

    Raises ValueError for another vocabulary, and as Generator does.
    """
    assert options.draft_model is not None
    file = ModelFile.find(options.draft_model)
    _check_vocabulary(file, larger)
    model = open_model(file, device=device, threads=options.threads)
    n_ctx = min(n_ctx, file.config.n_ctx_train)
    session = _draft_session(file, options, n_ctx, n_texts)
    return _core.DraftModel(model, session, larger.config.n_vocab)


def open_predictor(
    model: _core.Model, file: ModelFile, options: GeneratorOptions, *, n_ctx: int, n_texts: int
) -> _core.DraftModel:
    """The file's layer for multi-token prediction, with a cache as that of a draft model.

    Raises ValueError if it has none, or one that is not supported.
    """
    return _core.DraftModel.of_predictor(model, _draft_session(file, options, n_ctx, n_texts))


def open_lossless_drafts(
    model: _core.Model, cache: CacheOptions, *, n_texts: int, max_drafts: int
) -> _core.DraftModel:
    """The model itself, which proposes with the budget of `cache` what it generates with a full
    cache.

    cache: after for_model().

    Raises ValueError for a model or options that this does not support.
    """
    session = cache.core()
    session.max_sequences = n_texts
    session.max_drafts = max_drafts
    return _core.DraftModel.of_full_cache(model, session)


def _draft_session(
    file: ModelFile, options: GeneratorOptions, n_ctx: int, n_texts: int
) -> _core.SessionOptions:
    cache = CacheOptions(hh=min(options.draft_tokens, n_ctx), n_ctx=n_ctx, n_batch=options.n_batch)
    session = cache.resolve(file)
    session.max_sequences = n_texts
    session.max_drafts = options.max_drafts
    return session


def _check_vocabulary(file: ModelFile, larger: ModelFile) -> None:
    """Raises ValueError for a token that differs; one of them may have more."""
    pairs = zip(file.metadata.get(_TOKENS, ()), larger.metadata.get(_TOKENS, ()), strict=False)
    for i, (got, expected) in enumerate(pairs):
        if got != expected:
            raise ValueError(
                f"draft={file.path!r} has another vocabulary: token {i} is {short(got)}, expected "
                f"{short(expected)}"
            )
