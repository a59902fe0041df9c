"""Absurd values of every field of the schema, and paths that no file can have: refused in words, or fit to be used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import annotated_types
import pytest
from covering import covering
from pydantic import BaseModel

import slipstream
from slipstream import cli
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.fields import MAX_COUNT, MAX_INTEGER, MAX_WAIT_S, MIN_WAIT_S
from slipstream.core.plain import MAX_DEPTH, parse_float, parse_int, wrong_path, wrong_with
from slipstream.core.recipes import config_toml, defaults, field_paths, load_recipe, merge, validate
from slipstream.models.build import build_tokenizer
from slipstream.models.config import new_config
from slipstream.models.sizes import check_sizes
from slipstream.rewards.functions import MAX_REPETITIONS, make_term

MAX_ERROR = 8000  # characters of four parts and what stands around them

NUMBERS = [0, -1, 10**5, 10**12, 2**63, 10**400, 1e300, -1e300, 1e-300, math.nan, math.inf, True]
TEXTS = ["1", "", "a\0b", "a\nb", "\ud800", "x" * 1_000_000, "../" * 2000, "\x1b[2J"]
OTHERS: list[Any] = [None, [], {}, [[[]]], {"a": {"a": 1}}, ["\ud800"], {"\ud800": 1}, b"x", object()]


QUICKSTART = merge(defaults(), load_recipe("quickstart"))


def resolved(changes: Mapping[str, Any]) -> RunConfig:
    """`resolve("quickstart", changes)`, which reads no file."""
    return validate(merge(QUICKSTART, changes))


def tables_of(path: str, value: Any) -> dict[str, Any]:
    tables: Any = value
    for name in reversed(path.split(".")):
        tables = {name: tables}
    return dict(tables)


def annotation_of(path: str) -> Any:
    model: type[BaseModel] = RunConfig
    *sections, name = path.split(".")
    for section in sections:
        found = model.model_fields[section].annotation
        assert isinstance(found, type)
        model = found
    return model.model_fields[name]


def bounds(path: str) -> tuple[list[float], list[float]]:
    """The least and the largest values that the schema allows for the field, where it says so."""
    info = annotation_of(path)
    found = list(info.metadata)
    for part in get_args(info.annotation):
        for inner in getattr(part, "__metadata__", ()):
            found += inner.metadata if hasattr(inner, "metadata") else [inner]
    return (
        [constraint.ge for constraint in found if isinstance(constraint, annotated_types.Ge)]
        + [constraint.gt for constraint in found if isinstance(constraint, annotated_types.Gt)],
        [constraint.le for constraint in found if isinstance(constraint, annotated_types.Le)],
    )


def is_number(path: str) -> bool:
    kinds = {annotation_of(path).annotation, *get_args(annotation_of(path).annotation)}
    kinds |= {inner for kind in kinds for inner in get_args(kind)[:1]}
    return bool(kinds & {int, float})


PATHS = sorted(field_paths())
VALUES = [*NUMBERS, *TEXTS, *OTHERS]
FIFTHS = [pytest.param(path, VALUES[index % 5 :: 5], id=path) for index, path in enumerate(PATHS)]
ALL = [pytest.param(path, VALUES, id=f"{path}, all", marks=pytest.mark.slow) for path in PATHS]


@pytest.mark.parametrize(("path", "values"), [*FIFTHS, *ALL])
def test_every_field_takes_a_value_or_says_why_not(path: str, values: list[Any]) -> None:
    """What is accepted can be saved and read again. Each field gets a fifth of the values, all among the slow tests."""
    told = []
    for value in values:
        try:
            config = resolved(tables_of(path, value))
        except ConfigError as refused:
            told.append(str(refused))
        else:
            config_toml(config).encode()
    assert max(map(len, told)) < MAX_ERROR


def test_every_number_is_bounded() -> None:
    """A new field has a largest value, too: `inf` where there is none, 32 bits, or what its kind allows."""
    numbers = [path for path in field_paths() if is_number(path)]
    assert len(numbers) > 90
    for path in numbers:
        with pytest.raises(ConfigError):
            resolved(tables_of(path, 10**40))
        if path.endswith("_s"):
            assert bounds(path) == ([MIN_WAIT_S], [MAX_WAIT_S]), path


def largest() -> Iterator[tuple[str, float]]:
    """Each number of the schema at the largest value that it may have by itself."""
    for path in sorted(field_paths()):
        if is_number(path) and (most := bounds(path)[1]):
            yield path, min(most)


@pytest.mark.parametrize(("path", "value"), largest())
def test_the_largest_value_is_judged_by_arithmetic(path: str, value: float) -> None:
    """Whatever fields mean together and need: an error in words or none, and nothing of that size is made."""
    try:
        config = resolved(tables_of(path, value))
        shape = new_config(config.model, vocab_size=len(build_tokenizer(resolved({}).model)))
        check_sizes(config, shape, {"trainer", "generator"})
    except ConfigError as refused:
        assert refused.got is not None  # noqa: PT017 - or there is none


def test_other_machines_are_not_judged_by_this_one() -> None:
    """A policy that this machine cannot hold is no error where its groups are elsewhere, or compute on GPUs."""
    large = {"model": {"hidden_size": 2**17, "num_layers": 1000, "num_heads": 64, "num_kv_heads": 64}}
    on_gpus = {"trainer": {"device": "cuda"}, "generator": {"device": "cuda"}}
    config = resolved(large)
    shape = new_config(config.model, vocab_size=99)
    check_sizes(config, shape, set())
    check_sizes(resolved(merge(large, on_gpus)), shape, {"trainer", "generator"})
    for group in ("trainer", "generator"):
        with pytest.raises(ConfigError, match=r"parameters x \d+ bytes = .* GB"):
            check_sizes(config, shape, {group})


def test_ordinary_runs_are_not_refused() -> None:
    """A bound in the way of real work would be worse than none."""
    for changes in (
        {"steps": 1_000_000},
        {"groups_per_step": 4096, "completions_per_group": 64},
        {"rewards": {"num_workers": 64, "timeout_s": 3600.0}},
        {"trainer": {"epochs": 16, "microbatch_tokens": MAX_INTEGER}},
        {"eval": {"every": MAX_INTEGER}},
        {"generator": {"replicas": MAX_COUNT}},
    ):
        assert resolved(changes)


@pytest.mark.parametrize("name", ["out", "resume"])
@pytest.mark.parametrize("path", ["a\0b", "a\nb", "a\x7f", "\ud800", "x" * 300, "a/" * 3000, ""])
def test_no_file_has_such_a_path(
    name: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {name: path}
    with pytest.raises(ConfigError):
        slipstream.run("quickstart", display=False, **given)
    recipe = [] if name == "resume" else ["quickstart", "--steps", "0"]
    assert cli.main(["run", *recipe, f"--{name}", path]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "word"),
    covering(
        ["run", "eval", "report", "watch", "serve", "replay", "simulate", "plan"],
        ["a\0b", "a\nb", "\udcff", "x" * 300],
    ),
)
def test_no_command_takes_such_a_path(
    command: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, word]) == 2
    assert "error: " in capsys.readouterr().err


def test_numbers_of_flags() -> None:
    assert [parse_int(text) for text in ("12", "-3", "+4")] == [12, -3, 4]
    assert [parse_float(text) for text in ("1", "-2.5", ".5", "1e-3", "inf")] == [1.0, -2.5, 0.5, 1e-3, math.inf]
    for text in ("1_000", "١٢", " 1", "1 ", "0x1", "1.0", "", "9" * 30, "1e3"):
        with pytest.raises(ValueError, match="no integer"):
            parse_int(text)
    for text in ("1_0.5", "١٢", " 1", "infinity", "", "1e", "0x1p3"):
        with pytest.raises(ValueError, match="no number"):
            parse_float(text)


def test_what_can_be_written() -> None:
    nested: Any = 1
    for _ in range(MAX_DEPTH):
        nested = [nested]
    assert wrong_with(nested) is None
    assert wrong_with({"a": [1, 2.5, None, True, "é", 2**63 - 1]}) is None
    assert "nested" in str(wrong_with([nested]))
    assert "64 bits" in str(wrong_with({"a": [2**63]}))
    assert "surrogate" in str(wrong_with({"a": ["b\udfff"]}))
    assert wrong_path("runs/ä b/c.toml") is None


@pytest.mark.parametrize(
    "text", [r"\d{4}-\d{2}-\d{2}", r".{0,1000}answer: (.{0,1000})", "(a)" * 900, r"(?:(\d{1,3}),?){1,100}"]
)
def test_ordinary_patterns_are_compiled(text: str) -> None:
    make_term("regex", {"pattern": text})
    assert MAX_REPETITIONS >= 100 * 3
