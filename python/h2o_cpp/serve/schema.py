"""The base class of request objects, and types of their fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

_T = TypeVar("_T")

NonEmptyText = Annotated[str, Field(min_length=1)]
# Validation of a list stops at the first error; there could be very many.
ListOf = Annotated[list[_T], Field(fail_fast=True)]
NonEmptyList = Annotated[list[_T], Field(min_length=1, fail_fast=True)]

# Accepted only if they are empty: elements or characters would have an effect.
Empty = Annotated[list[Any], Field(max_length=0)]
NoText = Annotated[str, Field(max_length=0)]

ByType = Annotated[_T, Field(discriminator="type")]  # a union of classes with different types

UNKNOWN_FIELD = "unknown_field"  # the type of the validation error


class Schema(BaseModel):
    """Rejects unknown fields, because ignoring them could change the meaning of a request.

    Attributes: `ignored`, known fields without effect; `ignores_unknown`, for an API that does.
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
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in () if cls.ignores_unknown else values.items():
            if value is not None and name not in known and name not in cls.ignored:
                if cls._has_other_type(values):
                    break  # an error that the field of the type reports
                raise PydanticCustomError(UNKNOWN_FIELD, "there is no such field", {"name": name})
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
        """Include the ignored fields; other fields may be null, or anything if they are ignored."""
        found = handler.resolve_ref_schema(handler(schema))
        properties = found.setdefault("properties", {})
        for name in cls.ignored:  # a subclass may have a field of this name
            properties.setdefault(name, {"description": "ignored"})
        found["additionalProperties"] = cls.ignores_unknown or {"type": "null"}
        return found
