"""Constrained outputs: JSON by a schema, a grammar, a regular expression or a choice.

The extra `grammar` (llguidance) computes the allowed tokens; the sampler chooses from them. Each
output has its own matcher.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.generation.gbnf import gbnf_to_lark, is_gbnf
from h2o_cpp.model.arguments import check_str, check_strings, short
from h2o_cpp.reply.json_schema import without_defaults

if TYPE_CHECKING:
    import llguidance

    from h2o_cpp.model.tokenizer import Tokenizer

FORMS = ("schema", "grammar", "regex", "choice")  # mutually exclusive options

# White space in JSON, as in llama.cpp; small models would not stop adding it.
_JSON = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}

_MAX_ERROR = 300  # characters

_MAX_COMPILED = 64  # per model, least recently used are dropped


class Constraint:
    """Sets the allowed tokens of one output, as `constraint=` does."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._n_read: int | None = None

    def __call__(self, tokens: NDArray[np.int32], allowed: NDArray[np.uint32]) -> None:
        """Raises ValueError if the grammar exceeds llguidance's limits."""
        matcher = self._matcher
        if self._n_read is None:
            self._n_read = len(tokens)  # the prompt
        elif len(tokens) > self._n_read:
            matcher.consume_tokens(tokens[self._n_read :].tolist())
            self._n_read = len(tokens)
        matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if matcher.is_error():
            raise ValueError(f"the grammar failed: {_error(matcher)}")


def form_of(options: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The given one of FORMS. Raises ValueError for several, or with `constraint`."""
    given = [name for name in (*FORMS, "constraint") if options.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"give either {given[0]} or {given[1]}, not both")
    if not given or given == ["constraint"]:
        return None
    if options.get("ignore_eos"):
        raise ValueError(f"{given[0]}= determines the end of the output, expected ignore_eos=False")
    return given[0], options[given[0]]


def make_constraint(
    tokenizer: Tokenizer, form: str, value: Any, *, around: str | None = None
) -> Constraint:
    """A constraint for one output; around: as around_form of Engine.submit.

    Raises ValueError if it does not compile, and TypeError.
    """
    with _mutex:
        compiled = _compilers.get(tokenizer)
        if compiled is None:
            compiled = _compilers[tokenizer] = _compiler(tokenizer)
    source = _source(form, value, tokenizer)
    if around is not None:
        source = _within(around, source)
    try:
        return Constraint(compiled(source).deep_copy())
    except ValueError as error:
        raise ValueError(f"{form}: {error}") from None


def _compiler(tokenizer: Tokenizer) -> Callable[[str], llguidance.LLMatcher]:
    """Compiles grammars for a vocabulary, and keeps the most recently used.

    Does not refer to the Tokenizer itself, whose lifetime limits its own.
    """
    library = _llguidance()
    vocabulary = library.LLTokenizer(
        library.TokenizerWrapper(_Vocabulary(tokenizer)),
        n_vocab=tokenizer.n_vocab,
        eos_token=sorted(tokenizer.end_tokens),
    )

    @lru_cache(_MAX_COMPILED)
    def compiled(source: str) -> llguidance.LLMatcher:
        found: llguidance.LLMatcher = library.LLMatcher(vocabulary, source, log_level=0)
        words = np.zeros((vocabulary.vocab_size + 31) // 32, np.uint32)
        found.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if found.is_error():
            raise ValueError(_error(found))
        return found

    return compiled


class _Vocabulary:
    """The tokenizer interface of llguidance."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.end_tokens:
            raise ValueError("the model has no end-of-text token, which constrained outputs need")
        self.eos_token_id = min(tokenizer.end_tokens)
        self.bos_token_id = tokenizer.bos
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.n_vocab)]
        self.special_token_ids = [token for token, found in enumerate(self.tokens) if not found]
        for token in self.special_token_ids:
            self.tokens[token] = f"<|{token}|>".encode()  # matches no text
        self._core = tokenizer.core

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._core.encode(
            text, add_special=False, parse_special=False, begins=False, most=None
        )


_compilers: WeakKeyDictionary[Tokenizer, Callable[[str], llguidance.LLMatcher]]
_compilers = WeakKeyDictionary()
_mutex = threading.Lock()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ImportError("grammars need llguidance: pip install 'h2o-cpp[grammar]'") from None
    return llguidance


def _source(form: str, value: Any, tokenizer: Tokenizer) -> str:
    """The grammar in llguidance's format."""
    matcher = _llguidance().LLMatcher
    if form == "schema":
        return str(matcher.grammar_from_json_schema(_schema(value), defaults=_JSON))
    if form == "regex":
        return str(matcher.grammar_from_regex(check_str(form, value)))
    lark = _choice(value) if form == "choice" else _lark(value, tokenizer)
    return str(matcher.grammar_from_lark(lark))


def _within(around: str, source: str) -> str:
    """A grammar that refers to another one, `source`, as @form."""
    if source.startswith("{"):
        [form] = json.loads(source)["grammars"]
    else:
        form = {"lark_grammar": source}
    return json.dumps({"grammars": [{"lark_grammar": around}, {**form, "name": "form"}]})


def _lark(grammar: Any, tokenizer: Tokenizer) -> str:
    """A grammar in either form as Lark."""
    if not is_gbnf(check_str("grammar", grammar)):
        return str(grammar)
    try:
        return gbnf_to_lark(grammar, tokenizer)
    except ValueError as error:
        raise ValueError(f"grammar: {error}") from None


def _error(matcher: llguidance.LLMatcher) -> str:
    """A matcher's error in one line, without its state and the rest of a long grammar."""
    text = " ".join(str(matcher.get_error()).partition("<state>")[0].split())
    if text == "NoExtensionBias":
        return "no text matches it"
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


def _schema(value: Any) -> str:
    """A schema as JSON text."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"schema is not JSON: {error}") from None
        if not isinstance(value, dict | bool):
            raise ValueError(f"schema is {short(value)}, expected an object, true or false")
    if isinstance(value, bool):
        value = {"allOf": [value]}  # llguidance adds options to it
    if not isinstance(value, Mapping):
        raise TypeError(f"schema={short(value)}, expected a dict, JSON text or a pydantic model")
    try:
        return json.dumps(without_defaults(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"schema is not JSON: {error}") from None


def _choice(value: Any) -> str:
    strings = check_strings("choice", value)
    if not strings or not all(strings):
        raise ValueError(f"choice={short(value)}, expected one or more non-empty strings")
    return "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in strings)
