"""Checks before a run starts: reward functions exist, and barriers hold where verifiers evaluate text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import msgspec

from slipstream.core.errors import ConfigError
from slipstream.core.sections import RewardsConfig, TaskConfig, names_of
from slipstream.core.types import Prompt
from slipstream.jail.isolation import BARRIERS, REQUIRED_FOR_UNSAFE
from slipstream.rewards.functions import BUILTINS, UNSAFE_VERIFIERS, make_term
from slipstream.rewards.given import check_given, is_from_python
from slipstream.rewards.judge import Judge
from slipstream.rewards.pool import ScoringPool
from slipstream.rewards.protocol import Task, Term, WorkerSetup

COMPARING = frozenset({"exact_match", "overlap", "math"})  # built-ins that abstain without an answer to compare with


@lru_cache(maxsize=1)
def isolation_report() -> dict[str, bool]:
    """Test which barriers hold on this machine by starting one worker (a quarter second)."""
    pool = ScoringPool(WorkerSetup(terms=[], tasks={}, memory_bytes=1 << 30, timeout_s=1.0), num_workers=1)
    try:
        pool.wait_ready()
        return {barrier: barrier in pool.isolation for barrier in BARRIERS}
    finally:
        pool.close()


def terms_of(config: RewardsConfig) -> list[Term]:
    """All functions of `config`, each with its name, and no judges; ConfigError as `make_term`."""
    terms = [make_term(term.function, term.params, term.per) for term in config.terms]
    names = names_of([term.function for term in config.terms])
    return [msgspec.structs.replace(term, name=name) for term, name in zip(terms, names, strict=True)]


def setup_of(config: RewardsConfig, tasks: Mapping[str, TaskConfig]) -> WorkerSetup:
    """The workers' setup; ConfigError for unknown functions or parameters. What was given from Python is not theirs.

    It is that of all workers: `setups_by_place` divides it.
    """
    terms = terms_of(config)
    if not terms and not config.judges:
        raise ConfigError(
            "a run needs at least one reward function",
            got="rewards.terms = [], no rewards.judges and no rewards.models",
            allowed=", ".join(f"'{name}'" for name in BUILTINS) + ", or your own function",
            hint="see rewards.terms",
        )
    if any(term.function == "task" for term in terms) and not tasks:
        raise ConfigError(
            "reward 'task' needs reasoning-gym tasks",
            got="prompts from a dataset",
            allowed=", ".join(f"'{name}'" for name in BUILTINS if name != "task") + ", or your own function",
            hint="'task' is the default of rewards.terms: name another function there",
        )
    return WorkerSetup(
        terms=[term for term in terms if not is_from_python(term)],
        tasks={key: Task(name=task.name, params=task.params) for key, task in tasks.items()},
        memory_bytes=config.memory_mb << 20,
        timeout_s=config.timeout_s,
        allow_network=config.allow_network,
        environment=config.environment,
    )


WORKERS, NETWORK = "workers", "network"


def setups_by_place(config: RewardsConfig, tasks: Mapping[str, TaskConfig]) -> dict[str, WorkerSetup]:
    """The setups of workers without network, and of those of the terms that have it; none where there are no terms."""
    setup, terms = setup_of(config, tasks), terms_of(config)
    has_network = {term.name: config.has_own_network(one) for term, one in zip(terms, config.terms, strict=True)}
    divided = {
        WORKERS: [term for term in setup.terms if not has_network[term.name]],
        NETWORK: [term for term in setup.terms if has_network[term.name]],
    }
    return {
        place: msgspec.structs.replace(setup, terms=own, allow_network=setup.allow_network or place == NETWORK)
        for place, own in divided.items()
        if own
    }


def unsafe_verifiers(setup: WorkerSetup) -> list[str]:
    """Names in UNSAFE_VERIFIERS that this setup would run."""
    functions = {term.function for term in setup.terms}
    tasks = {task.name for task in setup.tasks.values()} if "task" in functions else set()
    return sorted((functions | tasks) & UNSAFE_VERIFIERS.keys())


def check_answers(config: RewardsConfig, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for prompts that nothing would score: without an answer, where all rewards compare with it."""
    functions = [term.function for term in config.terms]
    without = [prompt for prompt in prompts if prompt.answer is None]
    if not without or not functions or config.models or not COMPARING.issuperset(functions):
        return
    raise ConfigError(
        f"reward {', '.join(repr(name) for name in functions)} compares with an answer, and prompts have none",
        got=f"{len(without)} of {len(prompts)} prompts without, such as {without[0].text[:60]!r}",
        allowed="an answer in every row",
        hint="see prompts.answer_column; rows without an answer can only be scored by other rewards",
    )


def check_isolation(setup: WorkerSetup, held: Collection[str], *, trust_verifier: bool) -> None:
    """ConfigError when a verifier evaluates model text and a barrier it needs is missing, unless it is trusted."""
    missing = sorted(REQUIRED_FOR_UNSAFE - set(held))
    unsafe = unsafe_verifiers(setup)
    if unsafe and setup.allow_network and not trust_verifier:
        raise ConfigError(
            f"the verifier of '{unsafe[0]}' evaluates model text with {UNSAFE_VERIFIERS[unsafe[0]]}, which is to have "
            "no network",
            got="rewards.allow_network = true, or network = true of its term",
            allowed="network = true of others, rewards.allow_network = false, or rewards.trust_verifier = true",
            hint="[[rewards.judges]] are asked from outside of the workers, and need no such setting",
        )
    if unsafe and missing and not trust_verifier:
        raise ConfigError(
            f"the verifier of '{unsafe[0]}' evaluates model text with {UNSAFE_VERIFIERS[unsafe[0]]}, "
            "and this platform cannot isolate it",
            got=f"no isolation of: {', '.join(missing)}",
            allowed="run as root or where user namespaces are permitted, or rewards.trust_verifier = true",
            hint="a completion could run commands as you; trust it only in a disposable machine",
        )


def check_rewards(config: RewardsConfig, tasks: Mapping[str, TaskConfig], given: Collection[str] = ()) -> None:
    """Everything that can be refused without prompts. Starts a worker only when a verifier is known as unsafe.

    `given`: the names of the functions that were handed over from Python.
    """
    check_given(config, given)
    for setup in setups_by_place(config, tasks).values():
        if unsafe_verifiers(setup) and not config.trust_verifier:
            if setup.allow_network:
                check_isolation(setup, REQUIRED_FOR_UNSAFE, trust_verifier=False)
            held = [barrier for barrier, holds in isolation_report().items() if holds]
            check_isolation(setup, held, trust_verifier=False)
    for judge in config.judges:
        Judge(judge, max_chars=config.max_chars)
