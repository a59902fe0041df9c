"""What a page says of experiments is read back as it was written, and its overview says the same in short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments import overview
from experiments.__main__ import main
from experiments.catalogue import EXPERIMENTS, HEADLINE, Entry
from experiments.section import PAGE, ROOT, Section, Told, Verdict, read, write

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
    path.write_text(
        "# Results\n\n<!-- overview -->\n<!-- end -->\n\n<!-- one -->\n<!-- end -->\n\n<!-- two -->\n<!-- end -->\n"
    )
    return path


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(overview, "EXPERIMENTS", {name: Entry(name, 1) for name in ("one", "two", "three")})
    monkeypatch.setattr(overview, "HEADLINE", ("one",))


def test_what_is_written_is_read_back(page, tmp_path):
    write("one", SECTION, TOOK, page=page, images=tmp_path)
    assert read("one", page=page) == Told(SECTION.title, SECTION.verdicts, TOOK)
    assert read("two", page=page) is None
    assert read("three", page=page) is None


def test_a_section_without_claims_or_cost_is_read_back(page, tmp_path):
    write("two", replace(SECTION, verdicts=[], notes=()), page=page, images=tmp_path)
    assert read("two", page=page) == Told(SECTION.title, [], "")


def test_nothing_found_is_said(page, three):
    overview.write_table(page=page)
    assert overview_of(page) == overview.NOTHING


def test_the_table_has_first_claims_tallies_and_what_it_took(page, three, tmp_path):
    other = replace(SECTION, title="Other", verdicts=[], notes=())
    write("one", SECTION, TOOK, page=page, images=tmp_path)
    write("two", other, "1 run, 9 minutes on 2 cores of an abacus", page=page, images=tmp_path)
    for _ in range(2):
        overview.write_table(page=page)
    link = "[Does it? Yes, at k = 8](#does-it-yes-at-k--8)"
    assert overview_of(page) == (
        "| experiment | first claim | holds here | found | all claims | minutes |\n"
        "|---|---|---|---|---:|---:|\n"
        f"| {link} | It is faster. | yes | 1.5 (0.1) | 1 yes, 1 **no**, 1 cannot say | 41 |\n"
        "| [Other](#other) |  |  |  |  | 9 |\n"
        "\n"
        "It took 50 minutes on 2 cores of an abacus, 41 of them for the headline set (`make experiments`). "
        "Not run yet: three.\n"
    )
    assert read("one", page=page) == Told(SECTION.title, SECTION.verdicts, TOOK)


def test_a_page_without_the_place_is_an_error(tmp_path):
    path = tmp_path / "results.md"
    path.write_text("# Results\n")
    with pytest.raises(ValueError, match="0 places for overview"):
        overview.write_table(page=path)


def test_the_overview_says_what_the_sections_say():
    """It is not written by hand: `python -m experiments.overview` makes this pass."""
    found = {name: told for name in EXPERIMENTS if (told := read(name)) is not None}
    assert overview_of(PAGE) == overview.table(found)


def overview_of(page):
    _, _, rest = page.read_text(encoding="utf-8").partition(f"<!-- {overview.PLACE} -->\n")
    return rest.partition("<!-- end -->")[0]


def test_an_experiment_that_breaks_leaves_the_next_its_turn(tmp_path, monkeypatch, capsys):
    def breaks(lab):
        return {}["kl"]

    monkeypatch.setattr("experiments.collation.experiment.section", breaks)
    monkeypatch.setattr("experiments.adam_epsilon.experiment.section", lambda lab: SECTION)
    assert main(["collation", "adam_epsilon", "--no-write", "--folder", str(tmp_path)]) == 1
    found = capsys.readouterr()
    assert "collation failed:" in found.err
    assert "KeyError: 'kl'" in found.err
    assert "## Does it? Yes, at k = 8" in found.out


def test_the_headline_set_takes_less_than_three_hours():
    assert sum(EXPERIMENTS[name].minutes for name in HEADLINE) < 180
    hours = sum(entry.minutes for name, entry in EXPERIMENTS.items() if name != "gpu") / 60
    assert hours == pytest.approx(26, abs=0.5)
    assert "TRL beside us: twenty-six hours;" in (ROOT / "Makefile").read_text(encoding="utf-8")
