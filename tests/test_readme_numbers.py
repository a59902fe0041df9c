"""README's comparison against the sections of docs/results.md that runs have written."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = {  # how the row begins: (section, column, contenders in the order of the row's numbers)
    "one task, two cores": ("peers", "reward 0.9 after, s", ["oldest first", "synchronous", "TRL, GRPO"]),
    "SmolLM2-135M on word problems": (
        "real_model",
        "reward 0.5 after, s",
        ["synchronous", "one step ahead", "continuous, k = 2", "TRL, GRPO"],
    ),
    "in the same runs: accuracy": (
        "real_model",
        "accuracy, sampled",
        ["synchronous", "one step ahead", "continuous, k = 2", "TRL, GRPO"],
    ),
    "by its admission rule: largest staleness": (
        "peers",
        "largest",
        ["oldest first", "TRL, GRPO", "drop stale groups", "budget of samples"],
    ),
    "by its admission rule: sampled tokens discarded": (
        "peers",
        "discarded, %",
        ["oldest first", "TRL, GRPO", "drop stale groups", "budget of samples"],
    ),
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def column(section: str, name: str) -> dict[str, float]:
    """The means of a column of the section's tables, by contender."""
    page = (ROOT / "docs/results.md").read_text()
    body = page.split(f"<!-- {section} -->")[1].split("<!-- end -->")[0]
    head, found = list[str](), dict[str, float]()
    for line in body.splitlines():
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells(line)
        elif name in head and (value := re.match(r"[\d.]+", cells(line)[head.index(name)])):
            found[cells(line)[0]] = float(value[0])
    return found


@pytest.mark.parametrize("begins", ROWS)
def test_numbers_are_those_of_the_runs(begins: str) -> None:
    section, name, contenders = ROWS[begins]
    [line] = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {begins}")]
    counted = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)(?: s\b| %| steps| \(|,|$)")
    told = [float(number) for cell in cells(line)[1:] for number in counted.findall(cell)]
    measured = column(section, name)
    assert told == [measured[contender] for contender in contenders]


def test_the_page_on_smollm2_has_the_seconds_of_the_runs() -> None:
    told = re.findall(r"(\d+) s\b", (ROOT / "docs/smollm2.md").read_text().split("## Beside TRL")[1].split("\n## ")[0])
    measured = column("real_model", "reward 0.5 after, s")
    assert list(map(float, told)) == [measured["synchronous"], measured["TRL, GRPO"]]
