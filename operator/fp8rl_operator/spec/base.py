"""Base of every record of the API and the few types that its fields share.

Decimals: a CustomResource carries no floats, so the CRD says `type: string` with a pattern and the manifest says
`learningRate: "5e-4"`. The models hold `float`; a bare number is accepted in Python and on the command line.
Every string, list and map is bounded: the API server refuses CEL rules over unbounded input.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

DECIMAL_PATTERN = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$"
DECIMAL_MAX_LENGTH = 32
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
LABEL_KEY = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"


class Model(BaseModel):
    """Frozen; camelCase outside, snake_case inside; unknown fields refused; no value converted from another type."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, defer_build=True, allow_inf_nan=False, alias_generator=to_camel
    )


def parse_decimal(value: object) -> object:
    """A decimal string as a float; anything else unchanged.

    Raises:
        PydanticCustomError: the string is no decimal number.
    """
    if not isinstance(value, str):
        return value
    if len(value) > DECIMAL_MAX_LENGTH or not re.fullmatch(DECIMAL_PATTERN, value):
        raise PydanticCustomError(
            "decimal", "is no decimal number", {"remedy": 'write a number such as "0.5" or "5e-4"'}
        )
    return float(value)


def format_decimal(value: float) -> str:
    """The shortest decimal string that reads back as the same float."""
    return repr(value)


Decimal = Annotated[float, BeforeValidator(parse_decimal), PlainSerializer(format_decimal, return_type=str)]
Quantity = Annotated[str, Field(min_length=1, max_length=32, pattern=QUANTITY_PATTERN)]
Label = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=LABEL_KEY)]
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)]
ComputeResource = Annotated[str, Field(pattern=r"^(cpu|memory|ephemeral-storage)$")]
FreeObject = Annotated[dict[str, Any], Field(max_length=128)]
StringMap = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
AnnotationMap = Annotated[dict[LabelKey, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]
QuantityMap = Annotated[dict[ComputeResource, Quantity], Field(max_length=32)]
