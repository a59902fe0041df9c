"""Types of the configuration's fields, with their limits, and the base of its sections."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from slipstream.core.errors import ConfigError
from slipstream.core.plain import wrong_path, wrong_with

MAX_INTEGER = 2**31 - 1
"""Largest integer that libraries in C take. Unbounded fields mean 'as many as there are'."""
MAX_COUNT = 2**16
"""Most items that each take memory or time: layers, processes, groups of a step, completions of a group."""
MAX_STEPS = 10**8
"""Most steps: at 10 ms each twelve days; metrics.jsonl alone has hundreds of GB then."""
MAX_EPOCHS = 1000
"""Most passes over a batch or a data set, far beyond any use: a batch is only left when all are done."""
MAX_NUMBER, MIN_POSITIVE = 1e30, 1e-30
"""Range of numbers that meet tensors: products of two stay in the range of float32, and none becomes 0 or inf."""
MIN_TEMPERATURE = 1e-6
"""Smallest temperature that is sampled at: logits divided by it stay in the range of float32."""
MAX_WAIT_S, MIN_WAIT_S = 2_000_000.0, 0.001
"""Range of waits: epoll and ZeroMQ count milliseconds, in 31 bits (24.8 days)."""


def _null_in(value: Any) -> str | None:
    is_in = isinstance(value, str) and "\0" in value
    return "a null character, which ends a text for whatever is written in C" if is_in else None


def _not_tiny(value: float) -> float:
    if value < MIN_POSITIVE:
        raise PydanticCustomError("greater_than_equal", "too small", {"ge": MIN_POSITIVE})
    return value


def _greedy_or_not_tiny(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise PydanticCustomError("greater_than_equal", "too small", {"ge": f"{MIN_TEMPERATURE:g}, or 0"})
    return value


def _not_huge(value: float) -> float:
    if MAX_NUMBER < value < math.inf:
        raise PydanticCustomError("less_than_equal", "too large", {"le": f"{MAX_NUMBER:g}, or inf"})
    return _not_tiny(value)


def _name(value: str) -> str:
    if "/" in value or value in (".", ".."):
        raise PydanticCustomError("name", "a name of a folder, not a path")
    return _path(value)


def _path(value: str) -> str:
    if (wrong := wrong_path(value)) is not None:
        raise PydanticCustomError("path", "{wrong}", {"wrong": wrong})
    return value


ABSOLUTE = {"are_paths_absolute": True}


def _absolute(value: str, info: SerializationInfo) -> str:
    is_there = info.context == ABSOLUTE and not value.startswith("stage:") and os.path.exists(value)
    return os.path.abspath(value) if is_there else value


def absolute_code(name: str) -> str:
    """Return a 'file.py:name' with the absolute path of its file; any other name as it is."""
    is_file = name.rpartition(":")[0].endswith(".py") and not name.startswith("~")
    return os.path.abspath(name) if is_file else name


def _absolute_code(value: str, info: SerializationInfo) -> str:
    return absolute_code(value) if info.context == ABSOLUTE else value


Positive = Annotated[int, Field(gt=0, le=MAX_INTEGER, strict=True)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True)]
Count = Annotated[int, Field(gt=0, le=MAX_COUNT, strict=True)]
Steps = Annotated[int, Field(gt=0, le=MAX_STEPS, strict=True)]
Epochs = Annotated[int, Field(gt=0, le=MAX_EPOCHS, strict=True)]
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, le=MAX_NUMBER, strict=True), AfterValidator(_not_tiny)]
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_NUMBER, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MAX_NUMBER, strict=True)]
TemperatureOrGreedy = Annotated[NonNegativeFloat, AfterValidator(_greedy_or_not_tiny)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
DecayRate = Annotated[float, Field(ge=0, lt=1, strict=True)]
Seconds = Annotated[float, Field(ge=MIN_WAIT_S, le=MAX_WAIT_S, strict=True)]
Limit = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=True), AfterValidator(_not_huge)]
"""A limit; inf means that there is none. All other numbers are finite."""
Interpreter = Annotated[str, AfterValidator(_path)]
"""Path of a Python; it stays as it is written, since its default is there or not by machine."""
FilePath = Annotated[str, AfterValidator(_path), PlainSerializer(_absolute, return_type=str)]
"""Path of a file or a folder, or a hub id. In a dump with the context ABSOLUTE, one that is there is absolute."""
CodeName = Annotated[str, PlainSerializer(_absolute_code, return_type=str)]
CodePath = Annotated[CodeName, AfterValidator(_path)]
"""A function or a class, as 'file.py:name' or 'module:name'; files are absolute in a dump with the context ABSOLUTE."""
Device = Annotated[str, Field(pattern=r"^(cpu|cuda)$")]
FolderName = Annotated[str, Field(max_length=100), AfterValidator(_name)]


Precision = Literal["float32", "bfloat16", "int8", "fp8", "mxfp4"]
"""Type in which a generator's weights are stored and multiplied; the trainer's are float32."""


def check_shared_layers(section: str, ranks_field: str, ranks: int, field: str, tensor_parallel: int) -> None:
    """Raise ConfigError unless the ranks of a scoring executor make whole tensor-parallel groups."""
    if ranks % tensor_parallel:
        raise ConfigError(
            "the ranks that score do not make whole tensor-parallel groups",
            got=f"{section}.{ranks_field} = {ranks}, {section}.{field} = {tensor_parallel}",
            allowed=f"{section}.{ranks_field}: a multiple of {section}.{field}",
        )


def _is_made_here(info: FieldInfo) -> bool:
    """Tell whether a field's default is a section with values of its own."""
    is_section = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    return is_section and info.default_factory is not None and not isinstance(info.default_factory, type)


class Section(BaseModel):
    """Base of all sections: immutable, unknown fields are errors, and every value can be written and sent."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Complete inner sections with their defaults here: those of `sft.optimizer` are not those of any optimizer."""
        if not isinstance(given, Mapping):
            return given
        completed = dict(given)
        for name, info in cls.model_fields.items():
            if _is_made_here(info) and isinstance(given.get(name), Mapping):
                default: BaseModel = info.get_default(call_default_factory=True)
                completed[name] = {**default.model_dump(exclude_unset=True), **given[name]}
        return completed

    @field_validator("*", mode="after")
    @classmethod
    def _check_plain(cls, value: Any) -> Any:
        if (wrong := wrong_with(value)) is not None or (wrong := _null_in(value)) is not None:
            raise PydanticCustomError("plain", "{wrong}", {"wrong": wrong})
        return value
