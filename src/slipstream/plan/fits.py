"""Costs of pieces of work, from the times of all processes of a run: the arithmetic behind `plan/calibrate.py`.

With C cores, t threads of its own, and g(n) the speed of a thread among n busy ones (`event_loop.Cores`), a second of a
process is g(n) / g(t) seconds of its work. g is linear in r, the speed with all cores busy over the speed alone. So

    sum over n of seconds(n) g(n) / g(t)  =  (costs of the pieces) / (speed of t threads)

is solved for the costs, for r, and for the speed of each number of threads: r and the speeds are searched, the costs
follow by least squares, none below zero. Quantities that runs do not show stay near those of such machines (`PRIORS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from slipstream.observe.balance import COMPUTING
from slipstream.observe.interference import work_curve
from slipstream.observe.states import kind, side_of
from slipstream.observe.timeline import Slice
from slipstream.plan.event_loop import BACKGROUND_SHARE, thread_speed
from slipstream.plan.recorded import RecordedRun


class Prior(NamedTuple):
    """The expected value of a quantity that runs may not show, and its expected relative error."""

    value: float
    error: float


PRIORS = {
    "beside": Prior(0.65, 0.4),
    "threads": Prior(1.0, 0.5),
    "fixed": Prior(0.2, 0.5),
    "drift": Prior(1.0, 0.03),
    "background": Prior(BACKGROUND_SHARE, 1.0),
}
"""`beside`: r. `threads`: the speed of t threads over that of t processes with one each. `fixed`: the share of a
piece's time that does not depend on its tokens. `drift`: how much slower one run was than another. `background`: what
a job of low priority gets of a core where others want all of them."""
SEARCH, SEARCH_STEPS = (2.0, 0.3, 0.03), 21  # logarithms that are searched to either side, one after the other
LEAST_BESIDE = 0.2  # r at least: beside another a thread keeps so much of its speed
ROUNDS = 3  # rounds of least squares, each weighed by the costs of the one before
INDEPENDENT = 200  # pieces at most that count as so many observations: neighbours in time have the same troubles


def speed(busy: int, cores: int) -> tuple[float, float]:
    """Return g(busy) of one thread among so many, as a and b of a + b r."""
    at_zero = thread_speed(busy, cores, 0.0)
    return at_zero, thread_speed(busy, cores, 1.0) - at_zero


class RunProcesses:
    """The processes of a run that compute, what they did in its loop, and when they were busy."""

    def __init__(self, run: RecordedRun) -> None:
        self.run, self.cores = run, cores_of(run)
        start_ns, end_ns = (round(seconds * 1e9) for seconds in run.loop_s)
        self.slices = {
            name: [
                one for one in records if isinstance(one, Slice) and start_ns <= one.start_ns <= one.end_ns <= end_ns
            ]
            for name, records in run.timelines.items()
        }
        processes = run.accounting.processes
        self.threads = {name: one.threads for name, one in processes.items() if side_of(name) in COMPUTING}
        self.busy = {name: work_curve(self.slices[name], lambda state: kind(state) == "work") for name in self.threads}
        [self.trainer, *_] = (name for name in self.threads if side_of(name) == "trainer")
        self.generators = [name for name in self.threads if side_of(name) == "generator"]

    def share(self, process: str, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """float64 [N] in 0..1: which part of each of these spans of time `process` was busy."""
        curve = self.busy[process]
        done = np.interp(end_ns, *curve) - np.interp(start_ns, *curve)
        share: np.ndarray = np.clip(done / np.maximum(end_ns - start_ns, 1), 0, 1)
        return share

    def rates(self, process: str, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """float64 [N, 2]: a and b of a + b r, the speed of one thread of `process` in each of these spans of time."""
        others = [name for name in self.threads if name != process]
        rates = np.zeros((len(start_ns), 2))
        for busy, chance in self._busy_threads(self.threads[process], others, start_ns, end_ns).items():
            rates += chance[:, None] * np.array(speed(busy, self.cores))
        return rates

    def _busy_threads(
        self, own: int, others: Iterable[str], start_ns: np.ndarray, end_ns: np.ndarray
    ) -> dict[int, np.ndarray]:
        """Busy threads -> share [N] of each span of time, as if the others were busy independently within it."""
        chances = {own: np.ones(len(start_ns))}
        for name in others:
            share = self.share(name, start_ns, end_ns)
            spread: dict[int, np.ndarray] = {}
            for busy, chance in chances.items():
                for count, part in ((busy, 1 - share), (busy + self.threads[name], share)):
                    spread[count] = spread.get(count, 0.0) + chance * part
            chances = spread
        return chances

    def work_s(self, process: str, slices: Iterable[Slice], states: Sequence[str], beside: float) -> float:
        """Return the work of `process` in `states` during `slices`, in seconds that it takes alone."""
        table = [(one.start_ns, one.end_ns, seconds_in(one, states)) for one in slices]
        table = [row for row in table if row[2] > 0]
        if not table:
            return 0.0
        start_ns, end_ns, seconds = np.array(table, dtype=np.float64).T
        total = float(seconds @ self.rates(process, start_ns, end_ns) @ np.array([1.0, beside]))
        return total / thread_speed(min(self.threads[process], self.cores), self.cores, beside)

    def background_s(self, start_ns: float, end_ns: float, beside: float) -> tuple[float, float]:
        """Seconds of work of a job of low priority in this span: with a core of its own, and with all cores wanted."""
        seconds = [0.0, 0.0]
        for threads, chance in self._busy_threads(0, self.threads, np.array([start_ns]), np.array([end_ns])).items():
            speed_s = thread_speed(min(threads + 1, self.cores), self.cores, beside)
            seconds[threads >= self.cores] += float(chance[0]) * (end_ns - start_ns) * 1e-9 * speed_s
        return seconds[0], seconds[1]


def cores_of(run: RecordedRun) -> int:
    """Return the cores of the trainer's machine: alone, it takes all of them (`controller/placement.py`)."""
    return run.accounting.processes["trainer"].most_threads * run.config.trainer.ranks


def seconds_in(one: Slice, states: Sequence[str]) -> float:
    """Return the seconds of a slice in `states`."""
    ns = one.state_ns if one.state in states else 0
    return 1e-9 * (ns + sum(also for state, also in one.also.items() if state in states))


@dataclass(frozen=True)
class Pieces:
    """Slices of work: seconds [N], counts [N, terms], how many `pieces` [N], and `rates` [N, 2] as of `RunProcesses`.

    `threads` [N] of the process, and the number of its run, `runs` [N].
    """

    seconds: np.ndarray
    counts: np.ndarray
    pieces: np.ndarray
    rates: np.ndarray
    threads: np.ndarray
    runs: np.ndarray

    @classmethod
    def of(
        cls, machine: RunProcesses, run: int, process: str, slices: Sequence[Slice], columns: Sequence[np.ndarray]
    ) -> Pieces:
        """Count the slices' own states alone."""
        table = [(one.start_ns, one.end_ns, one.state_ns * 1e-9, one.count) for one in slices]
        start_ns, end_ns, seconds, number = np.array(table, dtype=np.float64).reshape(-1, 4).T
        rates, counts = machine.rates(process, start_ns, end_ns), np.stack(columns, axis=1)
        threads = np.full(len(table), machine.threads[process])
        return cls(seconds, counts, number, rates, threads, np.full(len(table), run))

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def work(self, cores: int, beside: float, speeds: Mapping[int, float], drifts: np.ndarray) -> np.ndarray:
        """Seconds that each slice would have taken alone, with the threads whose speed is 1."""
        scale = {t: value / thread_speed(min(t, cores), cores, beside) for t, value in speeds.items()}
        factors = np.array([scale[int(t)] for t in self.threads])
        work: np.ndarray = self.seconds * (self.rates @ np.array([1.0, beside])) * factors / drifts[self.runs]
        return work


@dataclass(frozen=True)
class Fit:
    """A linear cost: seconds = sum of `terms` times their counts, alone, with as many threads as have speed 1.

    `beside` is r; `error` the relative one of a single piece; `residuals` are factors on the time of one piece.
    """

    terms: dict[str, float]
    speeds: dict[int, float]
    beside: float
    error: float
    residuals: tuple[float, ...]

    def seconds(self, threads: int, **counts: float) -> float:
        """Return the seconds of a piece with these counts, alone, with `threads`."""
        return sum(self.terms.get(name, 0.0) * count for name, count in counts.items()) / self.speed(threads)

    def speed(self, threads: int) -> float:
        """Return the speed of so many threads: as seen, or extrapolated from the nearest number seen."""
        if threads not in self.speeds:
            known = min(self.speeds, key=lambda seen: abs(seen - threads))
            return self.speeds[known] * together(threads, self.beside) / together(known, self.beside)
        return self.speeds[threads]


def together(threads: int, beside: float, cores: int = 0) -> float:
    """Return the work of so many threads over that of one alone. `cores`: as many as threads, if not given."""
    cores = cores or threads
    return min(threads, cores) * thread_speed(min(threads, cores), cores, beside)


def fit(terms: tuple[str, ...], cores: int, parts: Sequence[Pieces]) -> Fit:
    """Return the costs, r and speeds that explain these pieces best."""
    table = Pieces.joined(parts)
    seen = {int(t): float(table.seconds[table.threads == t].sum()) for t in np.unique(table.threads)}
    own = max(seen, key=lambda t: seen[t])
    beside, speeds, drifts = _search(table, cores, own, [t for t in seen if t != own])
    work = table.work(cores, beside, speeds, drifts)
    costs, _ = _solve(table, work)
    expected = np.maximum(table.counts @ costs, 1e-12)
    ratio = work / expected
    residuals = 1 + (ratio - 1) * np.sqrt(table.pieces)  # those of many pieces on end average out
    return Fit(
        terms=dict(zip(terms, costs.tolist(), strict=True)),
        speeds=speeds,
        beside=beside,
        error=float(np.sqrt(np.average((ratio - 1) ** 2, weights=expected))),
        residuals=tuple(residuals.tolist()),
    )


def _search(table: Pieces, cores: int, own: int, others: Sequence[int]) -> tuple[float, dict[int, float], np.ndarray]:
    """Return r, the speed of each number of threads relative to `own`, and the factor of each run's times.

    A point of the search has the logarithms of all of them; one after the other is searched, first coarsely, then
    finely. Two runs of the same work differ, as the machine was not the same: without a factor of its own for each run,
    such a difference would be taken for what their sizes cost.
    """
    prior, num_runs, speeds_end = PRIORS["beside"].value, int(table.runs.max()) + 1, 1 + len(others)
    usual = {t: together(t, prior, cores) / together(own, prior, cores) for t in others}

    def told(point: np.ndarray) -> tuple[float, dict[int, float], np.ndarray]:
        speeds = {t: usual[t] * float(np.exp(value)) for t, value in zip(others, point[1:speeds_end], strict=True)}
        drifts = point[speeds_end:] if num_runs > 1 else np.zeros(1)
        return float(np.exp(point[0])), {own: 1.0} | speeds, np.exp(drifts)

    def misfit(point: np.ndarray) -> float:
        _, found = _solve(table, table.work(cores, *told(point)))
        found += ((point[0] - float(np.log(prior))) / PRIORS["beside"].error) ** 2
        found += sum((value / PRIORS["threads"].error) ** 2 for value in point[1:speeds_end])
        # Heavy tails: machines are about the same from run to run, or something happened.
        return float(found + sum(2 * np.log1p((value / PRIORS["drift"].error) ** 2) for value in point[speeds_end:]))

    best = np.zeros(speeds_end + (num_runs if num_runs > 1 else 0))
    best[0] = np.log(prior)
    for reach in SEARCH:
        for index in [*range(1, len(best)), 0] * 2:
            points = np.tile(best, (SEARCH_STEPS, 1))
            points[:, index] += np.linspace(-reach, reach, SEARCH_STEPS)
            points[:, 0] = points[:, 0].clip(np.log(LEAST_BESIDE), 0.0)
            best = min(points, key=misfit)
    beside, speeds, drifts = told(best)
    # Told of the mean of the runs with each number of threads, not of the fastest of them.
    runs = {t: np.unique(table.runs[table.threads == t]) for t in speeds}
    means = {t: float(drifts[which].mean()) for t, which in runs.items()}
    for threads, which in runs.items():
        drifts[which] /= means[threads]
    return beside, {t: value * means[own] / means[t] for t, value in speeds.items()}, drifts


def _solve(table: Pieces, work: np.ndarray) -> tuple[np.ndarray, float]:
    """Return costs that explain `work`, and how badly: twice the negative log-likelihood.

    The variance is in proportion to what they expect, as large as each run's is: so sums of what they expect are sums
    of what there was, whatever the noise. The first term is what most pieces take whatever their size: it has a prior,
    which weighs as much as one piece.
    """
    counts, pieces, runs = table.counts, table.pieces, table.runs
    share, error = PRIORS["fixed"]
    has_first = counts[:, 0] > 0
    typical = float(work[has_first].mean())
    believed = float(counts[has_first, 0].mean()) / (error * np.sqrt(typical))
    costs, expected = np.zeros(counts.shape[1]), work.mean() * pieces / pieces.mean()
    noisiness, sizes = np.ones(int(runs.max()) + 1), np.bincount(runs)
    for _ in range(ROUNDS):
        scaled = counts / (noisiness[runs] * np.maximum(expected, 0.01 * typical))[:, None]
        matrix, target = counts.T @ scaled, scaled.T @ work
        matrix[0, 0] += believed**2
        target[0] += believed * share * np.sqrt(typical) / error
        costs = _not_negative(matrix, target)
        expected = counts @ costs
        squares = (expected - work) ** 2 / np.maximum(expected, 0.01 * typical)
        logs = np.log(np.bincount(runs, squares) / np.maximum(np.bincount(runs, expected), 1e-12) + 1e-6)
        mean = float(np.average(logs, weights=sizes))
        noisiness = np.exp(logs - mean)
    return costs, min(len(work), INDEPENDENT) * mean


def _not_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the solution of normal equations with no cost below zero: those that would be are left out."""
    used = list(range(len(target)))
    costs = np.zeros(len(target))
    while used:
        found = np.linalg.lstsq(matrix[np.ix_(used, used)], target[used], rcond=None)[0]
        if found.min() >= 0:
            costs[used] = found
            break
        del used[int(found.argmin())]
    return costs


def fit_background(seconds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (seconds of work, share of a core where others want all) of jobs alike.

    `seconds` of each: those that there was a core of its own, and those that others wanted all.
    """
    if not seconds:
        return 0.0, BACKGROUND_SHARE
    alone, wanted = np.array(seconds).T
    best = (np.inf, 0.0, BACKGROUND_SHARE)
    for share in np.geomspace(0.02, 1.0, 40):
        work = alone + share * wanted
        mean = max(float(work.mean()), 1e-12)
        misfit = min(len(work), INDEPENDENT) * float(np.log(work.var() / mean**2 + 1e-3))
        misfit += (np.log(share / PRIORS["background"].value) / PRIORS["background"].error) ** 2
        best = min(best, (misfit, mean, float(share)))
    return best[1], best[2]
