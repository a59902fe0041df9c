"""What a page says of experiments is read back as it was written, and README says the same in short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments import readme
from experiments.catalogue import EXPERIMENTS, Entry
from experiments.section import Section, Told, Verdict, read, write

ODD = r"a | b \n *c* `|d|`"
SECTION = Section(
    title="Does it? Yes, at k = 8",
    question="Does it?",
    setup="Once.",
    tables={"Like verdicts": "| claim | source |\n|---|---|\n| none | none |"},
    figures={},
    verdicts=[
        Verdict("It is faster.", "A, Fig. 1", True, "1.5 (0.1)"),
        Verdict(ODD, "L", False, ODD),
        Verdict("It is smaller.", "M4", None, "within noise"),
    ],
    cost="a minute",
    notes=["A note."],
)
TOOK = "27 runs and 1 measurement, 41 minutes on 2 cores of an abacus, commit `abcdef1`"


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "results.md"
    path.write_text("# Results\n\n<!-- one -->\n<!-- end -->\n\n<!-- two -->\n<!-- end -->\n")
    return path


@pytest.fixture
def front(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "EXPERIMENTS", {name: Entry(name, 1) for name in ("one", "two", "three")})
    monkeypatch.setattr(readme, "HEADLINE", ("one",))
    path = tmp_path / "README.md"
    path.write_text("# Us\n\n<!-- results -->\nold\n<!-- end -->\n\nAfter.\n")
    return path


def test_what_is_written_is_read_back(page, tmp_path):
    write("one", SECTION, TOOK, page=page, images=tmp_path)
    assert read("one", page=page) == Told(SECTION.title, SECTION.verdicts, TOOK)
    assert read("two", page=page) is None
    assert read("three", page=page) is None


def test_a_section_without_claims_or_cost_is_read_back(page, tmp_path):
    write("two", replace(SECTION, verdicts=[], notes=()), page=page, images=tmp_path)
    assert read("two", page=page) == Told(SECTION.title, [], "")


def test_nothing_found_is_said(page, front):
    readme.write_table(page=page, readme=front)
    assert front.read_text() == f"# Us\n\n<!-- results -->\n{readme.NOTHING}<!-- end -->\n\nAfter.\n"


def test_the_table_has_first_claims_tallies_and_what_it_took(page, front, tmp_path):
    other = replace(SECTION, title="Other", verdicts=[], notes=())
    write("one", SECTION, TOOK, page=page, images=tmp_path)
    write("two", other, "1 run, 9 minutes on 2 cores of an abacus", page=page, images=tmp_path)
    for _ in range(2):
        readme.write_table(page=page, readme=front)
    link = "[Does it? Yes, at k = 8](docs/results.md#does-it-yes-at-k--8)"
    assert front.read_text() == (
        "# Us\n\n<!-- results -->\n"
        "| experiment | its first claim | holds here | found | all its claims | minutes |\n"
        "|---|---|---|---|---:|---:|\n"
        f"| {link} | It is faster. | yes | 1.5 (0.1) | 1 yes, 1 **no**, 1 cannot say | 41 |\n"
        "| [Other](docs/results.md#other) |  |  |  |  | 9 |\n"
        "\n"
        "It took 50 minutes on 2 cores of an abacus, 41 of them for the headline set (`make experiments`). "
        "Not run yet: three.\n"
        "<!-- end -->\n\nAfter.\n"
    )


def test_a_readme_without_its_place_is_an_error(page, tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# Us\n")
    with pytest.raises(ValueError, match="0 places for results"):
        readme.write_table(page=page, readme=path)


def test_the_readme_says_what_the_page_says():
    """Neither is written by hand: `python -m experiments.readme` makes this pass."""
    found = {name: told for name in EXPERIMENTS if (told := read(name)) is not None}
    _, _, rest = readme.README.read_text(encoding="utf-8").partition(f"<!-- {readme.PLACE} -->\n")
    assert rest.partition("<!-- end -->")[0] == readme.table(found)
