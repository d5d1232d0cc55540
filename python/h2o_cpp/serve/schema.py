"""What all bodies of requests are, and the parts of them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

UNKNOWN_FIELD = "unknown_field"  # the type of that error


class Schema(BaseModel):
    """Fields that are not known are refused: they would have been meant to change something.

    Attributes: `ignored`, those that clients send and that change nothing, whatever they are.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Clients send null for what they do not set."""
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in values:
            if name not in known and name not in cls.ignored:
                raise PydanticCustomError(UNKNOWN_FIELD, "there is no such field", {"name": name})
        return {
            name: value for name, value in values.items() if value is not None and name in known
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """With the ignored fields."""
        found = handler.resolve_ref_schema(handler(schema))
        found["properties"] = {
            **found.get("properties", {}),
            **{name: {"description": "ignored"} for name in cls.ignored},
        }
        return found
