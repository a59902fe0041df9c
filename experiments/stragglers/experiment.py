"""Long completions under a hard bound: what the preset `tolerant` gains in time, and what it costs in staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from experiments.comparison import is_greater, keeps_gains
from experiments.lab import Lab
from experiments.peers import workload
from experiments.peers.contenders import CONTENDERS as PEERS
from experiments.peers.contenders import GROUPS_PER_STEP, Contender, K
from experiments.peers.experiment import PANELS, figure
from experiments.peers.reading import LONGEST, Seen, read_run
from experiments.peers.runs import Scale, answer_tokens, checkpoint, contest
from experiments.peers.verdicts import MARGIN, faster, keeps_promises
from experiments.section import Section, Verdict, markdown_table, spread
from slipstream.core.config import PRESETS
from slipstream.core.recipes import merge
from slipstream.prompts.stream import PromptStream

SLOTS = 128
"""As many as a step has completions: with fewer the generator is never idle, and there is nothing to gain."""
TOLERANT = PRESETS["tolerant"]
CONTENDERS: dict[str, Contender] = {
    name: Contender(title, whose, merge({"generator": {"num_slots": SLOTS}}, overrides))
    for name, (title, whose, overrides) in {
        "k2": (f"k = {K}", "Slipstream", {}),
        "k8": ("k = 8", "Slipstream", {"max_staleness": 8}),
        "tolerant": (f"tolerant: k = 8, W = {TOLERANT['overtake_steps']} P + 1", "Slipstream", TOLERANT),
        "drop_stale": (f"drop stale groups, k = {K}", PEERS["drop_stale"].whose, PEERS["drop_stale"].overrides),
        "areal": (f"admission by count, k = {K}", PEERS["areal"].whose, PEERS["areal"].overrides),
    }.items()
}
SCALE = Scale(names=tuple(CONTENDERS), seeds=(0, 1, 2, 3, 4))

Runs = Mapping[str, Sequence[Seen]]
"""By contender, one for each seed."""


def find(lab: Lab, scale: Scale) -> Runs:
    """Make what is missing, one by one; seeds outside, each beginning with another contender."""
    train, held_out = workload.write(lab.folder)
    start = checkpoint(train, held_out, scale.overrides)
    model, rows = lab.run(start) / "sft" / "model", workload.read(train)
    seen: dict[str, list[Seen]] = {name: [] for name in scale.names}
    for turn, seed in enumerate(scale.seeds):
        shift = turn % len(scale.names)
        for name in (*scale.names[shift:], *scale.names[:shift]):
            run = lab.run(contest(f"stragglers {name}", CONTENDERS[name], seed, start, model, scale.steps))
            seen[name].append(read_run(run, partial(answer_tokens, PromptStream(rows, seed))))
    return seen


def section(lab: Lab, scale: Scale = SCALE) -> Section:
    runs = find(lab, scale)
    return Section(
        title="Stragglers inside a hard bound",
        question="Where long completions hold up the trainer under a hard bound, how much faster is the preset "
        "`tolerant`, how much staler are its tokens, and how does it compare with dropping stale groups, and with a "
        "bound on admission alone?",
        setup=f"The task, policy and loss of [the peers](#against-peers-on-one-machine): answers of 6 to 180 tokens, "
        f"{GROUPS_PER_STEP} prompts of 8 completions a step, {scale.steps} steps, one generator; but {SLOTS} decode "
        f"slots, as many as a step has completions, so that the generator can be idle. Seeds "
        f"{', '.join(map(str, scale.seeds))}; one run at a time, contenders in turn. StaleFlow's rule is in the "
        "simulator only ([staleness.md](staleness.md#stragglers)).",
        tables={"Pace, waits, age of what is trained, and what is left out": table(runs)},
        figures={PANELS: figure(runs, CONTENDERS, tuple(CONTENDERS))},
        verdicts=verdicts(runs),
        notes=[
            "*waits for one*: the share of the time in which a batch lay ready behind one older group; *trainer idle* "
            "has all waits. Mean staleness is over tokens, length bias over groups.",
        ],
        cost="twenty minutes on two idle cores",
    )


def table(runs: Runs) -> str:
    head = ["contender", "completions/s", "trainer waits for one, %", "trainer idle, %", "staleness", "largest"]
    head += [f"older than {K}, %", "discarded, %", "length bias, %", f"longest {100 * LONGEST:g} % trained, %"]
    return markdown_table([*head, "accuracy, end"], (_row(*one) for one in runs.items()))


def _row(name: str, runs: Sequence[Seen]) -> tuple[str, ...]:
    return (
        CONTENDERS[name].title,
        spread([one.completions_per_s for one in runs], 0),
        spread([100 * one.straggler for one in runs], 1),
        spread([100 * one.trainer_idle for one in runs if one.trainer_idle is not None], 0),
        spread([one.staleness_mean for one in runs], 2),
        str(max(one.staleness_max for one in runs)),
        spread([100 * one.older for one in runs], 1),
        spread([100 * one.discarded for one in runs], 1),
        spread([100 * one.length_bias for one in runs], 1),
        spread([100 * one.longest_trained for one in runs], 0),
        spread([one.accuracy for one in runs]),
    )


def verdicts(runs: Runs) -> list[Verdict]:
    """By the rules of the README."""
    ours, source = runs["tolerant"], "docs/staleness.md"
    return [
        faster(f"`tolerant` has a higher pace than k = {K}", source, ours, runs["k2"]),
        keeps_promises(ours, TOLERANT["max_staleness"]),
        _staler("Its window makes k = 8 fresher: tokens are younger than without", runs["k8"], ours),
        _staler(f"Its price: tokens are older than at k = {K}", ours, runs["k2"]),
        faster(f"Dropping stale groups at k = {K} has a higher pace than `tolerant`", source, runs["drop_stale"], ours),
        faster("Admission by count has a higher pace than `tolerant`", source, runs["areal"], ours),
        _learns_as_much(ours, runs["k2"]),
    ]


def _staler(claim: str, old: Sequence[Seen], young: Sequence[Seen]) -> Verdict:
    older, younger = ([one.staleness_mean for one in some] for some in (old, young))
    got = f"{spread(younger, 2)} and {spread(older, 2)} steps old on average"
    return Verdict(claim, "docs/staleness.md", is_greater(older, younger), got)


def _learns_as_much(ours: Sequence[Seen], theirs: Sequence[Seen]) -> Verdict:
    mine, others = ([one.accuracy for one in some] for some in (ours, theirs))
    began = [one.before for one in theirs if one.before is not None]
    return Verdict(
        f"`tolerant` learns as much as k = {K} in as many steps (accuracy, margin {MARGIN:g})",
        "docs/staleness.md",
        keeps_gains(mine, others, began, MARGIN),
        f"{spread(mine)} and {spread(others)}",
    )
