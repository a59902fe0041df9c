"""Losses by name: one file each, one table. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.other_names import sentence_of_value
from slipstream.core.user_code import defined, imported

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.algorithms.losses.spec import LossInputs
    from slipstream.algorithms.reduce import Metrics

Unit = Literal["token", "sequence", "pair", "choice"]
Atom = Literal["sequence", "pair", "choice"]
Select = Literal["all", "best", "best_and_worst"]
Kind = Literal["policy", "value", "reward_model", "preference"]
InputName = Literal[
    "policy_logprobs",
    "advantages",
    "behaviour_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "teacher_divergences",
    "values",
    "anchor_values",
    "returns",
    "scores",
    "labels",
    "ratings",
    "is_desirable",
    "reference_kl",
    "cutoff",
]

LossFunction = Callable[..., "tuple[Tensor, Metrics]"]


@dataclass(frozen=True)
class Loss:
    """An entry of LOSSES, or a loss of one's own: `function(inputs, **params) -> (scalar loss, metrics)`.

    `source` is the function, or 'module.name' of one in this folder, which is imported when it is first called: the
    table itself needs no torch. `unit` is what the sum is divided by the count of; `requires` names the inputs it
    cannot do without; `params` are its constants with their defaults, `choices` the words allowed for those that are
    words, `above` what those that are numbers must exceed (0 if it is not said), `below` what they must stay under (if
    anything), and `from_zero` those that may be 0.
    `selects` are the completions of a group it can be trained on, `advantages` the estimators that it means something
    with (none named: all). `cutoff` is the 'module.name' of a function that finds the scalar input of that name, for
    one update over all ranks.
    """

    source: LossFunction | str
    unit: Unit
    requires: tuple[InputName, ...]
    params: Mapping[str, float | str] = field(default_factory=dict)
    kind: Kind = "policy"
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    above: Mapping[str, float] = field(default_factory=dict)
    below: Mapping[str, float] = field(default_factory=dict)
    from_zero: tuple[str, ...] = ()
    selects: tuple[Select, ...] = get_args(Select)
    advantages: tuple[str, ...] = ()
    cutoff: str | None = None

    @property
    def function(self) -> LossFunction:
        """The loss's function. Imports torch."""
        return _imported(self.source) if isinstance(self.source, str) else self.source

    @property
    def atom(self) -> Atom:
        """Return what must lie whole in one microbatch: a sequence, for token losses too, or a pair or choice."""
        return "sequence" if self.unit == "token" else self.unit

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the loss of a microbatch, and metrics as parts that add up. Raises MissingInputError."""
        for name in self.requires:
            inputs.need(name)
        return self.function(inputs, **self.params)

    def cutoff_of(self, columns: Mapping[str, Tensor], of_all_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the input "cutoff" of an update, [], from the `columns` [T] that the loss `requires`.

        These are of this rank; `of_all_ranks` joins a tensor [N] with those of the other ranks, which all call it.
        """
        assert self.cutoff is not None, "only a loss with a function for its cutoff has one"
        found: Tensor = _imported(self.cutoff)(**columns, of_all_ranks=of_all_ranks, **self.params)
        return found


def _imported(source: str) -> Callable[..., Any]:
    """Return the function 'module.name' of this folder."""
    module, _, name = source.partition(".")
    found: Callable[..., Any] = getattr(import_module(f"slipstream.algorithms.losses.{module}"), name)
    return found


_POLICY: tuple[InputName, ...] = ("policy_logprobs", "advantages")
_OFF_POLICY: tuple[InputName, ...] = (*_POLICY, "behaviour_logprobs")
_PAIRED: tuple[InputName, ...] = ("policy_logprobs", "reference_logprobs")
_DECOUPLED: tuple[InputName, ...] = (*_OFF_POLICY, "proximal_logprobs")
_MODES = ("truncate", "mask")

LOSSES: dict[str, Loss] = {
    "reinforce": Loss("reinforce.reinforce_loss", "token", _POLICY),
    "ppo": Loss(
        "ppo.ppo_loss",
        "token",
        _OFF_POLICY,
        {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": math.inf},
        above={"dual_clip": 1.0},  # at 1 or less, tokens of negative advantage would have no gradient on-policy
    ),
    "grpo": Loss("grpo.grpo_loss", "token", _OFF_POLICY, {"eps_low": 0.2, "eps_high": 0.28}),
    "cispo": Loss("cispo.cispo_loss", "token", _OFF_POLICY, {"eps_low": math.inf, "eps_high": 4.0}),
    "gspo": Loss("gspo.gspo_loss", "sequence", _OFF_POLICY, {"eps_low": 3e-4, "eps_high": 4e-4}),
    "aipo": Loss(
        "aipo.aipo_loss",
        "token",
        _OFF_POLICY,
        {"max_ratio": 4.0, "level": "token", "mode": "truncate", "eps_low": math.inf, "eps_high": math.inf},
        choices={"level": ("token", "sequence", "geometric"), "mode": _MODES},
    ),
    "aipo_masked": Loss("aipo.aipo_masked_loss", "token", _OFF_POLICY, {"max_ratio": 4.0}),
    "rloo": Loss("rloo.rloo_loss", "sequence", _POLICY),
    "proximal_rloo": Loss("proximal_rloo.proximal_rloo_loss", "sequence", _OFF_POLICY, {"eps": 0.2}),
    "copg": Loss("copg.copg_loss", "sequence", _OFF_POLICY),
    "online_dpo": Loss("online_dpo.online_dpo_loss", "pair", _PAIRED, {"beta": 0.1}, selects=("best_and_worst",)),
    "online_ipo": Loss("online_dpo.online_ipo_loss", "pair", _PAIRED, {"beta": 0.1}, selects=("best_and_worst",)),
    "best_of_n": Loss("best_of_n.best_of_n_loss", "sequence", ("policy_logprobs",), selects=("best",)),
    "decoupled_ppo": Loss(
        "decoupled_ppo.decoupled_ppo_loss",
        "token",
        _DECOUPLED,
        {"eps_low": 0.2, "eps_high": 0.2, "max_ratio": 5.0, "mode": "truncate"},
        choices={"mode": _MODES},
    ),
    "icepop": Loss(
        "icepop.icepop_loss",
        "token",
        _DECOUPLED,
        {"eps_low": 0.2, "eps_high": 0.2, "min_ratio": 0.5, "max_ratio": 5.0},
    ),
    "sapo": Loss("sapo.sapo_loss", "token", _OFF_POLICY, {"tau_pos": 1.0, "tau_neg": 1.05}),
    "dppo_tv": Loss(
        "dppo.dppo_tv_loss", "token", _OFF_POLICY, {"delta_low": 0.15, "delta_high": 0.15, "max_ratio": 20.0}
    ),
    "dppo_kl": Loss(
        "dppo.dppo_kl_loss", "token", _OFF_POLICY, {"delta_low": 0.05, "delta_high": 0.05, "max_ratio": 20.0}
    ),
    "m2po": Loss("m2po.m2po_loss", "token", (*_DECOUPLED, "cutoff"), {"threshold": 0.04}, cutoff="m2po.m2po_cutoff"),
    "mu_grpo": Loss(
        "mu_grpo.mu_grpo_loss",
        "token",
        _OFF_POLICY,
        {"eps_low": 0.8, "eps_high": 4.0, "veto_low": 0.2, "veto_high": 5.0},
        above={"veto_high": 1.0},
        below={"veto_low": 1.0},  # a band without 1 would veto tokens on-policy
        from_zero=("veto_low",),
    ),
    "oapl": Loss("oapl.oapl_loss", "sequence", _OFF_POLICY, {"beta": 1e-3}, advantages=("optimal",)),
    "distill": Loss(
        "distill.distill_loss",
        "token",
        ("policy_logprobs", "behaviour_logprobs", "teacher_divergences"),
        {"weight": "none", "max_ratio": 4.0},
        choices={"weight": ("none", "prefix")},
    ),
    "value": Loss("value.value_loss", "token", ("values", "anchor_values", "returns"), {"clip": 0.2}, kind="value"),
    "bradley_terry": Loss("bradley_terry.bradley_terry_loss", "pair", ("scores",), kind="reward_model"),
    "choice": Loss("choice.choice_loss", "choice", ("scores", "labels"), {"num_candidates": 4}, kind="reward_model"),
    "rating": Loss("rating.rating_loss", "sequence", ("scores", "ratings"), kind="reward_model"),
    "dpo": Loss(
        "dpo.dpo_loss",
        "pair",
        _PAIRED,
        {"beta": 0.1, "label_smoothing": 0.0},
        kind="preference",
        from_zero=("label_smoothing",),
    ),
    "ipo": Loss("online_dpo.online_ipo_loss", "pair", _PAIRED, {"beta": 0.1}, kind="preference"),
    "kto": Loss(
        "kto.kto_loss",
        "sequence",
        (*_PAIRED, "is_desirable", "reference_kl"),
        {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
        kind="preference",
    ),
    "simpo": Loss(
        "simpo.simpo_loss",
        "pair",
        ("policy_logprobs",),
        {"beta": 2.0, "gamma": 1.0},
        kind="preference",
        from_zero=("gamma",),
    ),
}


def loss_named(name: str, params: Mapping[str, float | str]) -> Loss:
    """Return the loss `name` with its constants set to `params`, defaults elsewhere; built once.

    `name` is a key of LOSSES, or names a Loss of the user's as 'file.py:name' or 'module:name', which is imported.
    Numbers exceed the loss's `above`, 0 by default (inf is allowed), words are one of its `choices`. ConfigError on
    anything else, and on an unknown name or parameter with the nearest known one.
    """
    path = Path(name.rpartition(":")[0]).expanduser()
    changed_ns = path.stat().st_mtime_ns if path.suffix == ".py" and path.is_file() else 0
    return _built(name, tuple(params.items()), changed_ns)


@cache
def _from_file(name: str, changed_ns: int) -> Loss:
    """Return the Loss that is 'file.py:name' or 'module:name'. ConfigError where that is none of a policy."""
    del changed_ns  # a file that was written anew is read again
    defined(name, what="loss", kind="loss")
    loss = imported(name, what="loss", modules={})
    if isinstance(loss, Loss):
        _check_words(loss, name)
    unknown = sorted(set(loss.requires) - set(get_args(InputName))) if isinstance(loss, Loss) else []
    if not isinstance(loss, Loss) or unknown or loss.cutoff is not None or "cutoff" in loss.requires:
        raise ConfigError(
            f"'{name}' is no loss that can be trained",
            got=f"it requires {', '.join(unknown) or 'a cutoff'}" if isinstance(loss, Loss) else repr(loss)[:80],
            allowed="a slipstream.algorithms.losses.Loss that requires some of "
            + ", ".join(name for name in get_args(InputName) if name != "cutoff"),
        )
    return loss


def _check_words(loss: Loss, name: str) -> None:
    """Raise ConfigError for a unit or kind that there is none of, and for `requires` that is no tuple."""
    for what, word, known in (("unit", loss.unit, Unit), ("kind", loss.kind, Kind)):
        if word not in get_args(known):
            raise ConfigError.unknown(f"loss '{name}' has a {what} that is none", str(word), get_args(known), got=word)
    if not isinstance(loss.requires, tuple | list):
        allowed = "names of inputs, as in ('policy_logprobs',)"
        raise ConfigError(f"loss '{name}' has a `requires` that is no tuple", got=repr(loss.requires), allowed=allowed)


@cache
def _built(name: str, params: tuple[tuple[str, float | str], ...], changed_ns: int) -> Loss:
    if name not in LOSSES and ":" not in name:
        policies = sorted(known for known, loss in LOSSES.items() if loss.kind == "policy")
        hint = sentence_of_value("loss.name", name) or did_you_mean(name, policies)
        allowed = f"{', '.join(policies)}, or 'file.py:name' of a Loss"
        raise ConfigError(f"unknown loss '{name}'", got=name, allowed=allowed, hint=hint)
    loss = LOSSES[name] if name in LOSSES else _from_file(name, changed_ns)
    for param, value in params:
        above, is_zero = loss.above.get(param, 0.0), value == 0 and param in loss.from_zero
        if param not in loss.params:
            raise ConfigError.unknown(
                f"loss '{name}' has no parameter '{param}'", param, sorted(loss.params), got=param, none="none"
            )
        if param in loss.choices:
            if value not in loss.choices[param]:
                raise ConfigError.unknown(
                    f"loss '{name}' knows no {param} '{value}'", str(value), loss.choices[param], got=value
                )
        elif isinstance(value, str) or not (value > above or is_zero) or value >= loss.below.get(param, math.nan):
            least = "number >= 0" if param in loss.from_zero else f"number > {above:g}"
            most = f" and < {loss.below[param]:g}" if param in loss.below else ""
            raise ConfigError(f"parameter '{param}' of loss '{name}' is out of range", got=value, allowed=least + most)
    return replace(loss, params={**loss.params, **dict(params)})
