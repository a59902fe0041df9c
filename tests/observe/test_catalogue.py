import re
from itertools import chain
from pathlib import Path

import pytest

from slipstream.observe.catalogue import CATALOGUE, STAGES, described, table

ROOT = Path(__file__).parents[2]
PUT_TOGETHER = (
    *("dropped/", "train/rm/", "train/", "chosen_mean", "rejected_mean", "num_preferences", "num_tokens"),
    *("chosen_reward", "rejected_reward"),
    *("eval_reward", "eval_accuracy", "eval_num_judged", "eval_sampled_"),
)
"""Beginnings of names that the sources put together from parts, or from a dataclass' fields."""
SHOWS = ("catalogue.py", "health.py", "trends.py", "display.py", "group_flow.py")
"""What reads metrics, beside the folders of pages: to be named there does not make a metric one that is written."""


def names() -> list[str]:
    return [name for group in chain(CATALOGUE.values(), STAGES.values()) for name in group]


def test_every_name_is_one_that_the_sources_write():
    files = [path for path in (ROOT / "src").rglob("*.py") if path.name not in SHOWS]
    text = "".join(path.read_text() for path in files if not {"report", "watch", "plan"} & set(path.parts))
    for name in names():
        stem = name.split("<")[0]
        is_composed = stem.endswith(("_mean", "_std")) and f'"{stem.rpartition("_")[0]}' in text
        assert f'"{stem}' in text or is_composed or name.startswith(PUT_TOGETHER), name


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("reward", "reward"),
        ("staleness_tokens/lag_12", "staleness_tokens/lag_<k>"),
        ("ratio_share/0.25", "ratio_share/<edge>"),
        ("reward_parts/file.py:reward#2", "reward_parts/<term>"),
        ("eval_reward", "eval_reward"),
        ("eval_sampled_reward_parts/format_reward", "eval_sampled_reward_parts/<term>"),
        ("wait_frac/generator-0@1/wait_trainer", "wait_frac/<process>/<state>"),
        ("time/trainer/wait_rewards", "time/<side>/<state>"),
        ("staleness_tokens/lag_x", None),
        ("time/trainer", None),
        ("rewards", None),
    ],
)
def test_a_name_is_found_by_its_pattern(name, known):
    found = described(name)
    assert (found and found[0]) == known


def test_no_name_has_two_entries():
    every = [name for group in CATALOGUE.values() for name in group]
    assert len(every) == len(set(every))
    for name in every:
        example = re.sub(r"<k>|<edge>", "3", name).replace("<", "").replace(">", "")
        assert described(example) == (name, next(group[name] for group in CATALOGUE.values() if name in group))


def test_the_tables_of_the_document_are_the_catalogue():
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    for marker, groups in (("metrics", CATALOGUE), ("stage-metrics", STAGES)):
        assert page.split(f"<!-- {marker} -->\n")[1].split("<!-- end -->")[0].splitlines() == list(table(groups))
