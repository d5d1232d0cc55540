"""Request bodies: their base class, types of fields, parsing, and description in OpenAPI."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import models_json_schema
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, from_json

from h2o_cpp.serve.errors import ApiError

_T = TypeVar("_T")

NonEmptyText = Annotated[str, Field(min_length=1)]
# Validation of a list stops at the first error; there could be very many.
ListOf = Annotated[list[_T], Field(fail_fast=True)]
NonEmptyList = Annotated[list[_T], Field(min_length=1, fail_fast=True)]

# Accepted only if they are empty: elements or characters would have an effect.
Empty = Annotated[list[Any], Field(max_length=0)]
NoText = Annotated[str, Field(max_length=0)]

ByType = Annotated[_T, Field(discriminator="type")]  # a union of classes with different types

# The cost of parsing depends on the number of values rather than bytes. These limits exceed any
# conversation or batch of token ids that fits in a context.
_MAX_MEMBERS = 2**16  # arrays, objects and keys
_MAX_VALUES = 2**18
_SCAN_BYTES = 8 * 2**10  # shorter bodies are not checked

# Types of validation errors.
_UNKNOWN_FIELD = "unknown_field"
_UNKNOWN_TYPE = "union_tag_invalid"
_NO_TYPE = "union_tag_not_found"
_SHOULD = "Input should be "  # how pydantic's messages begin

_models: list[type[BaseModel]] = []  # of request bodies

_SCHEMAS = "#/components/schemas/{model}"

_Request = TypeVar("_Request", bound=BaseModel)


class Schema(BaseModel):
    """Rejects unknown fields, because ignoring them could change the meaning of a request.

    Attributes: `ignored`, known fields without effect; `ignores_unknown`, as in Tolerant.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[tuple[str, ...]] = ()
    ignores_unknown: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Drop nulls, also of unknown fields: clients send them for fields that are not set."""
        if not isinstance(values, dict):
            return values
        known = _known(cls)
        for name, value in () if cls.ignores_unknown else values.items():
            if value is not None and name not in known and name not in cls.ignored:
                if cls._has_other_type(values):
                    break  # an error that the field of the type reports
                raise PydanticCustomError(_UNKNOWN_FIELD, "there is no such field", {"name": name})
        return {
            name: value for name, value in values.items() if value is not None and name in known
        }

    @classmethod
    def _has_other_type(cls, values: dict[str, Any]) -> bool:
        """Whether the values are of a type that this class is not."""
        field = cls.model_fields.get("type")
        if field is None or get_origin(field.annotation) is not Literal:
            return False
        return "type" in values and values["type"] not in get_args(field.annotation)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Include the ignored fields; fields that are not required may be null, and unknown ones
        too, or anything if they are ignored."""
        found = handler.resolve_ref_schema(handler(schema))
        properties = found.setdefault("properties", {})
        for name in properties.keys() - {*found.get("required", ())}:
            properties[name] = _nullable(properties[name])
        for name in cls.ignored:  # a subclass may have a field of this name
            properties.setdefault(name, {"description": "ignored"})
        found["additionalProperties"] = cls.ignores_unknown or {"type": "null"}
        return found


class Tolerant(Schema):
    """Ignores unknown fields: clients send earlier replies back with fields of their own."""

    ignores_unknown = True


@cache
def _known(model: type[BaseModel]) -> frozenset[str]:
    """The names of a model's fields in requests."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _nullable(field: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a field that may be null."""
    null = {"type": "null"}
    if null in field.get("anyOf", ()):
        return field
    value = dict(field)
    shown: dict[str, Any] = {
        key: value.pop(key) for key in ("title", "description", "default") if key in value
    }
    return {"anyOf": [value, null], **shown}


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
    elif error["type"] == _UNKNOWN_FIELD:
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
