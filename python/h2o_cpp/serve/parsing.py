"""Parsing and validating request bodies, and their description in the OpenAPI document."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import ErrorDetails, from_json

from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.schema import UNKNOWN_FIELD

# The cost of parsing depends on the number of values rather than bytes. These limits exceed any
# conversation or batch of token ids that fits in a context.
_MAX_MEMBERS = 2**16  # arrays, objects and keys
_MAX_VALUES = 2**18
_SCAN_BYTES = 8 * 2**10  # shorter bodies are not checked

# Types of pydantic's errors.
_UNKNOWN_TYPE = "union_tag_invalid"
_NO_TYPE = "union_tag_not_found"
_SHOULD = "Input should be "  # how pydantic's messages begin

_models: list[type[BaseModel]] = []  # of request bodies

_SCHEMAS = "#/components/schemas/{model}"

_Request = TypeVar("_Request", bound=BaseModel)


def parse(model: type[_Request], body: bytes) -> _Request:
    """Parse a request, regardless of its Content-Type. Raises ApiError."""
    if len(body) > _SCAN_BYTES:
        _check_counts(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error, body) from None


def check(model: type[_Request], values: Any) -> _Request:
    """Validate a request given as a dict. Raises ApiError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _invalid(error, values) from None


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of an endpoint that takes this model."""
    _models.append(model)
    schema = {"$ref": _SCHEMAS.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_schemas() -> dict[str, Any]:
    """The OpenAPI schemas of the models given to body_of(), by name."""
    models: Any = [(model, "validation") for model in dict.fromkeys(_models)]
    _, found = models_json_schema(models, ref_template=_SCHEMAS)
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def _check_counts(body: bytes) -> None:
    """Reject bodies that are slow to parse, without parsing them and mostly without the GIL."""
    plain = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    strings = np.logical_xor.accumulate(plain == ord('"'))
    rest = plain[~strings]
    if sum(np.count_nonzero(rest == ord(c)) for c in "{[:") > _MAX_MEMBERS:
        raise ApiError(400, f"the body has more than {_MAX_MEMBERS} arrays, objects and keys")
    if np.count_nonzero(rest == ord(",")) > _MAX_VALUES:
        raise ApiError(400, f"the body has more than {_MAX_VALUES} values")


def _invalid(error: ValidationError, given: Any) -> ApiError:
    """The response to invalid values, or to a body that contains them."""
    errors = error.errors(include_url=False, include_input=False)
    values = from_json(given) if isinstance(given, bytes) and errors[0]["loc"] else given
    # Each type of a union has an error; that of the type which fits most of the value counts.
    field = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    best = max(map(_progress, field))
    most = [e for e in field if _progress(e) == best]
    place = _place(most[0], values)
    param = ".".join(place) or None
    first, *others = dict.fromkeys(_message(e) for e in most if _place(e, values) == place)
    message = " or ".join([first, *(other.removeprefix(_SHOULD) for other in others)])
    return ApiError(400, message if param is None else f"{param}: {message}", param=param)


def _progress(error: ErrorDetails) -> tuple[int, list[int], bool]:
    """How much was valid before the error."""
    place = error["loc"]
    indices = [part for part in place if isinstance(part, int)]
    n_read = len(place) + (error["type"] in (_UNKNOWN_TYPE, _NO_TYPE))
    return n_read, indices, not error["type"].endswith("_type")


def _place(error: ErrorDetails, values: Any) -> list[str]:
    """The path to an invalid value, without the names of a union's types."""
    place: list[str] = []
    is_missing = error["type"] == "missing"  # perhaps null
    for part in error["loc"][:-1] if is_missing else error["loc"]:
        try:
            values = values[part]
        except (LookupError, TypeError):
            continue
        place.append(str(part))
    if is_missing:
        place.append(str(error["loc"][-1]))
    elif error["type"] == UNKNOWN_FIELD:
        name = error["ctx"]["name"]
        if place and not (isinstance(values, dict) and name in values):
            place.pop()  # the name of a union's type, which also has a field of this name
        place.append(name)
    elif error["type"] in (_UNKNOWN_TYPE, _NO_TYPE):
        place.append("type")
    return place


def _message(error: ErrorDetails) -> str:
    if error.get("ctx", {}).get("max_length") == 0:
        return "this field is not supported"
    if error["type"] == _UNKNOWN_TYPE:
        tag, expected = error["ctx"]["tag"], error["ctx"]["expected_tags"]
        return f"{tag!r} is not supported, expected {expected}"
    return "Field required" if error["type"] == _NO_TYPE else error["msg"]
