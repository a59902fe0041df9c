"""The reasons for the best configuration: its active constraint, and what its neighbours would lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from slipstream.core.plain import plural
from slipstream.core.recipes import read_toml
from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import GB
from slipstream.plan.layouts import Parts, is_flat
from slipstream.plan.search import Found, Misfit, Search, Signature, devices_of, executors, most_slots, signature_of

BALANCED = 0.02  # executors whose times are closer than this are called equally fast
WORTH_TELLING = 0.01  # share of an executor's time
WORTH_TOLERATING = 0.1  # share of a step that stragglers take: above it a window is (docs/staleness.md, Stragglers)

WORDS = read_toml(Path(__file__).with_name("words.toml"))
CAUSES, USES = WORDS["causes"], WORDS["uses"]
NAMES: dict[str, str] = WORDS["executors"]


def limits(found: Found) -> Iterator[str]:
    """Name the executor that limits the step, and what each does with its time."""
    sides = found.step.sides
    limiting = max(sides, key=lambda name: sides[name].total)
    bound_s = found.longest_s / found.max_staleness if found.max_staleness else 0.0
    if bound_s > found.step.seconds * (1 + BALANCED):
        steps = plural(found.max_staleness, "step")
        yield (
            f"The staleness bound limits: a step's longest completion takes {found.longest_s:.3g} s, and within "
            f"{steps} it has to be done, so that no step is shorter than {bound_s:.3g} s; {NAMES[limiting]} would do "
            f"with {sides[limiting].total:.3g} s."
        )
    else:
        others = [f"{NAMES[name]} {side.total:.3g} s" for name, side in sides.items() if name != limiting]
        verb = "limit" if limiting == "generator" else "limits"
        work = f"{sides[limiting].total:.3g} s of work a step; {', '.join(others)}."
        yield f"{NAMES[limiting].capitalize()} {verb}: {work}"
    for name, side in sides.items():
        spent = sorted(side.parts.items(), key=lambda item: -item[1])[:2]
        shares = " and ".join(
            f"{seconds / side.total:.0%} {CAUSES.get(cause, cause)}"
            for cause, seconds in spent
            if seconds > WORTH_TELLING * side.total
        )
        yield f"{NAMES[name].capitalize()}: {shares}."


def constraints(costs: CostModel, space_slots: Sequence[int], found: Found) -> Iterator[str]:
    """Name what keeps microbatch and slots from being larger: memory, the work there is, or nothing to be gained."""
    plan = found.side_by_side
    generator, trainer = plan.generator, plan.trainer
    more = next((slots for slots in space_slots if slots > generator.slots), None)
    most = most_slots(costs.workload, generator.replicas, found.max_staleness)
    if generator.slots >= most:
        yield f"{generator.slots} slots a replica hold all completions that may be in flight."
    elif more is not None:
        held = costs.generator_memory(replace(generator, slots=more))
        if costs.fits(held):
            yield f"{more} slots a replica instead of {generator.slots} would fit, and make no step shorter."
        else:
            yield f"Memory is the limit for slots: {_over(f'{more} a replica', held, costs)}."
    larger_batch = replace(trainer, microbatch=2 * trainer.microbatch)
    trained = costs if plan.critic is None else costs.without_critic
    held = trained.train_memory(larger_batch, served=generator.precision)
    if plan.reference is not None:
        held = held.without("reference")
    if trainer.microbatch * trainer.data_parallel >= costs.workload.trained_rollouts / costs.workload.minibatches:
        yield f"A microbatch of {trainer.microbatch:g} is all that a rank gets."
    elif not costs.fits(held):
        yield f"Memory is the limit for the microbatch: {_over(f'{larger_batch.microbatch:g} rollouts', held, costs)}."
    else:
        yield f"A microbatch of {larger_batch.microbatch:g} would fit, and make no step shorter."


def losses(search: Search, found: Found, table: Mapping[Signature, Found]) -> str | None:
    """Name what changes of the best configuration lose, one property at a time; None where there are none."""
    plan, own, changed = found.side_by_side, signature_of(found.side_by_side), []
    for field, words in WORDS["alternatives"].items():
        other = next((s for s in table if getattr(s, field) != getattr(own, field)), None)
        if other is not None:
            value = getattr(other, field)
            told = words.get(str(value), words.get("other")).format(value)
            changed.append(f"{told} {_longer(table[other].seconds / found.seconds)}")
    other_way = next(iter(search.asynchronous(found.max_staleness, flat=not found.flat).values()), None)
    if other_way is not None and not (found.flat and all(map(is_flat, executors(other_way.plan).values()))):
        told = "pipeline stages" if found.flat else "no pipeline stages"
        changed.append(f"{told} {_longer(other_way.seconds / found.seconds)}")
    for giver, taker in (("trainer", "generator"), ("generator", "trainer")):
        moved = search.shifted(found, giver, taker)
        if moved is not None:
            count = devices_of(plan)[giver] - devices_of(moved.plan)[giver]
            told = f"{plural(count, 'GPU')} moved from {NAMES[giver]} to {NAMES[taker]}"
            changed.append(f"{told} {_longer(moved.seconds / found.seconds)}")
    return f"Otherwise: {'; '.join(changed)}." if changed else None


def staleness(steps_s: Mapping[int, float], bound: int) -> str:
    """Explain this bound by the step times of all that were tried."""
    best = min(steps_s, key=lambda tried: (steps_s[tried], tried))
    told = f"k = {bound} is the smallest bound within 2% of the shortest step ({steps_s[best]:.3g} s at k = {best})"
    if bound == max(steps_s):
        told += ", and the largest one that was tried (--max-staleness)"
    lower = max((tried for tried in steps_s if tried < bound), default=None)
    if lower is None:
        return f"{told}."
    longer = steps_s[lower] / steps_s[bound]
    told += f": k = {lower} makes it {steps_s[lower]:.3g} s, {_longer(longer)}."
    if lower and longer > 1 + WORTH_TOLERATING:
        told += f" With overtake_steps = {bound - lower} only stragglers would be older than at k = {lower}."
    return told


def against_synchronous(step_s: float, synchronous: Found | None) -> str:
    """Compare with taking turns on the same devices, and name what most of its time is spent on."""
    if synchronous is None:
        return "No configuration fits whose executors take turns on the same devices."
    causes = synchronous.step.sides["trainer"] + synchronous.step.sides["generator"]
    cause, seconds = max(causes.parts.items(), key=lambda item: item[1])
    return (
        f"{synchronous.seconds / step_s:.2f} times as fast as the best synchronous configuration, which spends "
        f"{seconds / synchronous.seconds:.0%} of its {synchronous.seconds:.3g} s on {CAUSES.get(cause, cause)}."
    )


def misfit_line(misfit: Misfit, usable_bytes: float, unit: str = "GPU") -> str:
    """Name an executor that does not fit, by how much, what takes the room, and from where on it fits."""
    largest = sorted(misfit.memory.parts.items(), key=lambda item: -item[1])[:2]
    holds = ", ".join(f"{gigabytes(nbytes)} GB {USES.get(name, name)}" for name, nbytes in largest)
    count = plural(misfit.devices, unit)
    where = f"on {count}" if misfit.fits_from is None else f"on {count} or fewer"
    degree = f", {misfit.tensor_parallel} of them sharing each layer" if misfit.tensor_parallel > 1 else ""
    degree += f", in {misfit.stages} stages" if misfit.stages > 1 else ""
    shares = f"more {unit}s to share each layer" if misfit.executor == "generator" else f"more {unit}s"
    remedy = f"it takes {shares}" if misfit.fits_from is None else f"it fits on {misfit.fits_from}"
    who = f"{NAMES[misfit.executor].capitalize()} {where}{degree} ({misfit.precision} versions)"
    short_bytes = misfit.memory.total - usable_bytes
    held = f"{gigabytes(misfit.memory.total)} GB of {gigabytes(usable_bytes)}, {gigabytes(short_bytes)} GB short"
    return f"{who}: {held} ({holds}); {remedy}."


def gigabytes(nbytes: float, digits: int = 3) -> str:
    """Write bytes in GB, with so many digits and no exponent."""
    amount = nbytes / GB
    return f"{amount:,.0f}" if amount >= 100 else f"{Decimal(f'{amount:.{digits}g}'):f}"


def _over(what: str, held: Parts, costs: CostModel) -> str:
    room = f"{gigabytes(held.total)} GB of {gigabytes(costs.usable_bytes)}"
    return f"{what} would take {room}, {gigabytes(held.total - costs.usable_bytes)} GB too many"


def _longer(factor: float) -> str:
    percent = 100 * (factor - 1)
    return "as fast" if abs(percent) < 0.5 else f"{percent:+.0f}%"
