"""docs/algorithms.md: its tables name what there is, its settings are valid, and its loss of one's own works."""

import math
import os
import re
import textwrap
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loss_cases import evaluate, finite_differences, random_inputs

import slipstream
from slipstream.algorithms.losses import LOSSES, Loss, loss_named
from slipstream.algorithms.losses.trial import try_loss
from slipstream.controller.checks import check_loss
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.training_sections import LossConfig

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
[OWN] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
PROSE = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)
SETTINGS = [textwrap.dedent(block) for block in re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", PROSE, flags=re.MULTILINE)]
ALWAYS = {"policy_logprobs", "advantages", "behaviour_logprobs"}


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = PAGE.split(f"# {heading}\n", maxsplit=1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()[2:]]


@pytest.fixture
def awr(monkeypatch):
    """The page's example in the table of losses."""
    names: dict[str, Loss] = {}
    exec(OWN, names)
    monkeypatch.setitem(LOSSES, "awr", names["awr"])


@pytest.fixture
def file(monkeypatch, tmp_path):
    """The page's example as a file, in the present folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "awr.py"
    path.write_text(OWN)
    return path


def test_the_tables_have_a_row_for_every_loss_with_its_unit_and_needs():
    documented = {}
    for heading in ("Policy losses", "Losses that train no policy", "Losses on a data set of preferences"):
        for name, unit, needs, *_ in rows(heading):
            documented[name.strip("`")] = (unit, {need for need in needs.split(", ") if need})
    assert documented == {name: (loss.unit, set(loss.requires) - {"policy_logprobs"}) for name, loss in LOSSES.items()}


def test_every_estimator_of_advantages_has_a_row():
    allowed = LossConfig.model_json_schema()["properties"]["advantages"]["enum"]
    assert [row[0].strip("`") for row in rows("Advantages")] == allowed


@pytest.mark.usefixtures("file")
def test_the_settings_on_the_page_are_valid():
    assert len(SETTINGS) == 6
    for block in SETTINGS:
        check_loss(resolve("quickstart", tomllib.loads(block)))


@pytest.mark.usefixtures("awr")
def test_the_example_golden():
    """By hand: weights e^(1/0.5), 1 and e^(-1/0.5), each over three tokens."""
    inputs = random_inputs([2, 1])
    inputs = replace(inputs, advantages=torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64))
    _, grad, _ = evaluate("awr", inputs, temperature=0.5)
    expected = [-math.exp(2.0) / 3, -1.0 / 3, -math.exp(-2.0) / 3]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.usefixtures("awr")
def test_the_example_has_its_identity_and_gradient():
    inputs = random_inputs([3, 1, 4])
    loss, grad, _ = evaluate("awr", inputs, temperature=math.inf)
    assert loss == pytest.approx(-inputs.policy_logprobs.mean().item())
    torch.testing.assert_close(grad, torch.full_like(grad, -1 / len(grad)))
    _, grad, _ = evaluate("awr", inputs)
    numeric = finite_differences(
        lambda policy: evaluate("awr", replace(inputs, policy_logprobs=policy))[0], inputs.policy_logprobs
    )
    torch.testing.assert_close(grad, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("file")
def test_the_example_trains(tmp_path):
    overrides = {
        "host": "inline",
        "steps": 2,
        "groups_per_step": 2,
        "completions_per_group": 2,
        "model": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1},
        "prompts": {"num_train": 40, "num_eval": 4},
        "generator": {"num_slots": 8},
        "loss": {
            "name": "awr.py:awr",
            "params": {"temperature": 0.5},
            "advantages": "group_mean",
            "skip_no_signal": False,
        },
        "warm_start": {"steps": 0},
        "rewards": {"terms": [{"function": "exact_match"}]},  # that of the task imports for seconds
        "eval": {"num_prompts": 4, "num_slots": 8, "measure": "exact_match"},
    }
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert result.status == "done"
    assert result.summary["policy_version"] == 2


def test_a_file_that_was_written_anew_is_read_again(file):
    assert loss_named("awr.py:awr", {}).params == {"temperature": 1.0}
    file.write_text(OWN.replace('"temperature": 1.0', '"temperature": 2.0'))
    os.utime(file, ns=(1, 1))
    assert loss_named("awr.py:awr", {}).params == {"temperature": 2.0}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('Loss(awr_loss, "token", ("policy_logprobs", "advantage"))', "it requires advantage"),
        ('Loss(awr_loss, "token", ("policy_logprobs", "cutoff"))', "it requires a cutoff"),
        ('Loss(awr_loss, "choice", ("policy_logprobs",))', "compares candidates"),
        ('Loss(awr_loss, "pair", ("policy_logprobs",))', "loss.select = 'best_and_worst'"),
        ("awr_loss", "is no loss that can be trained"),
        ("[awr_loss]", "no loss"),
        ('Loss(awr_los, "token", ())', "NameError"),
        ('Loss(awr_loss, "token", ("policy_logprobs",), kind="value")', "is not a loss of a policy"),
        ('Loss(awr_loss, "token", ("policy_logprobs",), kind="policies")', "a kind that is none(?s:.*)mean 'policy'"),
        ('Loss(awr_loss, "tokens", ("policy_logprobs",))', "a unit that is none(?s:.*)did you mean 'token'"),
        ('Loss(awr_loss, "completion", ("policy_logprobs",))', "allowed: token, sequence, pair, choice"),
        ('Loss(awr_loss, "token", ("policy_logprobs"))', r"got:     'policy_logprobs'(?s:.*)\('policy_logprobs',\)"),
    ],
)
def test_what_is_no_loss_is_refused(file, entry, message):
    file.write_text(OWN.split("awr = ")[0] + f"awr = {entry}\n")
    with pytest.raises(ConfigError, match=message):
        check_loss(resolve("quickstart", {"loss": {"name": "awr.py:awr"}}))


def test_a_loss_that_takes_the_divergence_from_a_teacher_learns_from_it_alone(file):
    """As `distill` does; but it may take advantages, too."""
    file.write_text(OWN.replace('"advantages"), {', '"advantages", "teacher_divergences"), {'))
    loss = {"name": "awr.py:awr", "advantages": "greedy_baseline"}
    check_loss(resolve("quickstart", {"loss": loss, "teacher": {"path": "t"}}))
    for teacher, message in (({"path": "t", "coef": 0.5}, "counted twice"), ({}, "no teacher to learn from")):
        with pytest.raises(ConfigError, match=message):
            check_loss(resolve("quickstart", {"loss": loss, "teacher": teacher}))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("inputs.nothing, {}", r"(?s)fails on made-up inputs.*AttributeError.*\(awr.py, line 20\)"),
        (
            "inputs.average(inputs.need('values')), {}",
            r"(?s)which this batch does not carry \(awr.py, line 20\)",
        ),
        ("inputs.need('policy_logprobs'), {}", r"Tensor of shape \[10\] and dict"),
        ("inputs.average(inputs.need('policy_logprobs'))", r"Tensor of shape \[\] alone"),
        ("1.0, {}", "got:     float and dict"),
        ("inputs.average(inputs.need('advantages')), {}", "can be differentiated"),
        ("inputs.average(inputs.need('policy_logprobs')), {'x': 1.0}", "AttributeError.*\n.*metrics of masked_mean"),
    ],
)
def test_a_loss_that_fails_is_told_of_before_the_run(file, returned, message):
    lines = OWN.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("    return "))
    lines[at] = f"    return {returned}"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=message.replace("line 20", f"line {at + 1}")):
        check_loss(resolve("quickstart", {"loss": {"name": "awr.py:awr"}}))


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.kind == "policy" and not loss.cutoff])
@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_losses_that_are_right_pass_the_trial(name, reduction):
    try_loss(LOSSES[name], name, {one for one in LOSSES[name].requires if one not in ALWAYS}, reduction=reduction)


@pytest.mark.usefixtures("file")
def test_names_that_are_not_there_are_answered():
    for name, message in {
        "awr.py:awl": "has no loss 'awl'",
        "owr.py:awr": "cannot be read",
        "nowhere:awr": "no module",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check_loss(resolve("quickstart", {"loss": {"name": name}}))
    with pytest.raises(ConfigError, match="of a Loss"):
        loss_named("owr", {})
