"""A smaller model that proposes what a larger one generates."""

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
    cache = CacheOptions(hh=min(options.draft_tokens, n_ctx), n_ctx=n_ctx, n_batch=options.n_batch)
    session = cache.resolve(file)
    session.max_sequences = n_texts
    return _core.DraftModel(model, session, larger.config.n_vocab)


def _check_vocabulary(file: ModelFile, larger: ModelFile) -> None:
    """Raises ValueError for a token that differs; one of them may have more."""
    pairs = zip(file.metadata.get(_TOKENS, ()), larger.metadata.get(_TOKENS, ()), strict=False)
    for i, (got, expected) in enumerate(pairs):
        if got != expected:
            raise ValueError(
                f"draft={file.path!r} has another vocabulary: token {i} is {short(got)}, expected "
                f"{short(expected)}"
            )
