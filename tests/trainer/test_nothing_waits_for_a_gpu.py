"""A training step whose tensors are on no device that has values: every read of the host's has to be one of those
that are counted here, or raises. Operators that wait for a GPU inside (nonzero, bincount, unique) raise there too.

Tensors that say they lie on CUDA have no autograd in a torch without CUDA; those on "meta" have.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import with_slow
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_data import TINY, VOCAB_SIZE, make_groups, run_config

from slipstream.algorithms.losses import LossInputs, loss_named
from slipstream.algorithms.losses.table import LOSSES
from slipstream.algorithms.reduce import Max, Mean, decode_metrics, encode_metrics
from slipstream.batching import collate as batching
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.config import new_config
from slipstream.models.sharded import Division, ShardedParameters, divide
from slipstream.models.transformer import Transformer
from slipstream.trainer.critic import Critic
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.records import TokenSample
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.teacher import Teacher

META = torch.device("meta")
UPDATES = 2
SMALL = TINY.model_copy(update={"num_layers": 1})
POLICY_LOSSES = [name for name, loss in LOSSES.items() if loss.kind == "policy" and name != "distill"]
FEW = ["m2po", "online_dpo"]
"""Of a measured policy with a cutoff, and of pairs; other tests take tokens' alone."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what the host reads, by the file that asks; it gets ones."""
    found: Counter[str] = Counter()

    def replace(name: str, answer: Any) -> None:
        plain = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.device != META:
                return plain(self, *args, **kwargs)
            found[Path(sys._getframe(1).f_code.co_filename).name] += 1
            return answer(self)

        monkeypatch.setattr(Tensor, name, counted)

    replace("tolist", lambda tensor: torch.ones(tensor.shape).tolist())
    replace("cpu", lambda tensor: torch.ones(tensor.shape))
    replace("__float__", lambda tensor: 1.0)
    return found


class CopiesToThere(TorchDispatchMode):
    """Refuses a copy to the device that the host would wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            assert kwargs.get("device", torch.device("cpu")).type == "cpu" or kwargs.get("non_blocking"), func
        return func(*args, **kwargs)


class Products(TorchDispatchMode):
    """Notes the types of matrix products, and operators of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()
        self.attention: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.types |= {one.dtype for one in args if isinstance(one, Tensor)}
        if "attn" in str(func) or "attention" in str(func):
            self.attention.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


DIVISION = Division(device=META, precision="bfloat16", copies=True)
"""As one GPU computes."""


def model_without_values() -> Transformer:
    with META:
        model = Transformer(new_config(SMALL, VOCAB_SIZE, eos_token_id=1, pad_token_id=0))
    divide(model, DIVISION)
    return model


def trained(
    changes: dict[str, Any], *, auxiliary: Auxiliary = Auxiliary(), tokens: TokenSample | None = None
) -> dict[str, float]:
    """The metrics of a step of two updates, each of several microbatches."""
    trainer = {"minibatches": UPDATES, "microbatch_tokens": 40, **changes.get("trainer", {})}
    config = run_config(**{"model": SMALL, **changes, "trainer": trainer})
    model = model_without_values()
    for layer in model.layers:
        layer.recomputes = config.trainer.recompute
    optimizer = AdamW(ShardedParameters(model, DIVISION), OptimizerConfig(), total_updates=UPDATES)
    if config.has_teacher:
        auxiliary = replace(auxiliary, teacher=Teacher(config.teacher, VOCAB_SIZE, 1.0, model_without_values()))
    if config.has_critic:
        auxiliary = Auxiliary(critic=Critic(config, model, DIVISION))
    with CopiesToThere(), Products() as products:
        metrics = train_on_batch(
            model,
            optimizer,
            make_groups(),
            config=config,
            step=0,
            batching=batching,
            auxiliary=auxiliary,
            tokens=tokens,
        )
    assert metrics["num_microbatches"] > UPDATES
    assert products.types == {torch.bfloat16} | ({torch.float32} if config.has_critic or config.has_teacher else set())
    assert products.attention == {"_varlen_attn", "_varlen_attn_backward"}
    return metrics


ALWAYS = {"update.py": UPDATES, "reduce.py": 1}
"""An update's losses together with its norm, when the optimizer's kernels are launched; a step's metrics."""


@pytest.mark.parametrize("name", with_slow(FEW, sorted({*POLICY_LOSSES} - {*FEW})))
def test_a_step_reads_what_an_update_has_to_know(name: str, reads: Counter[str]) -> None:
    """And once what was measured before the first update."""
    select = "best_and_worst" if LOSSES[name].unit == "pair" else "best" if name == "best_of_n" else "all"
    advantages = {"advantages": LOSSES[name].advantages[0]} if LOSSES[name].advantages else {}
    loss = {"name": name, "select": select, "skip_no_signal": False, **advantages}
    few = {"microbatch_tokens": 20} if select == "best" else {}  # of one completion of each group
    trained({"loss": loss, "trainer": few}, auxiliary=Auxiliary(reference=model_without_values()))
    measured = {"measure.py": 1} if {"reference_logprobs", "proximal_logprobs"} & set(LOSSES[name].requires) else {}
    assert reads == {**ALWAYS, **measured}


ESS: dict[str, Any] = {"loss": {"reduction": "constant"}, "trainer": {"ess_scaling": "sqrt"}}
KL: dict[str, Any] = {"kl": {"coef": 0.1, "place": "loss", "estimator": "k3", "corrected": True}}
TEACHER: dict[str, Any] = {"teacher": {"path": "somewhere", "coef": 0.5}}


@pytest.mark.parametrize(
    ("changes", "more"),
    with_slow(
        [
            ({**ESS, **KL, **TEACHER}, {"optim.py": UPDATES, "measure.py": 1}),
            ({"loss": {"name": "ppo", "advantages": "gae"}, "critic": {"model": "head"}}, {"measure.py": 1}),
        ],
        [
            (ESS, {"optim.py": UPDATES}),
            (KL, {"measure.py": 1}),
            (TEACHER, {}),
            ({"loss": {"reduction": "sequence", "entropy_coef": 0.1}}, {}),
            ({"trainer": {"recompute": True}}, {}),
            ({"loss": {"name": "distill"}, "teacher": {"path": "somewhere"}}, {}),
        ],
    ),
    ids=["ess, kl and teacher", "critic", "ess", "kl", "teacher", "sequence", "recompute", "distill"],
)
def test_what_stands_beside_the_loss_reads_nothing(
    changes: dict[str, Any], more: dict[str, int], reads: Counter[str]
) -> None:
    auxiliary = Auxiliary(reference=model_without_values())
    trained({"loss": {"name": "aipo", "skip_no_signal": False}, **changes}, auxiliary=auxiliary)
    of_critic = {"optim.py": UPDATES} if "critic" in changes else {}
    assert reads == {**ALWAYS, **more, **of_critic}, (
        "a critic's norm is read with the policy's, and behind its own update"
    )


def test_sampled_tokens_are_read_behind_the_step(reads: Counter[str]) -> None:
    sample = TokenSample(every=1)
    trained({"loss": {"name": "aipo", "skip_no_signal": False}}, tokens=sample)
    assert reads == ALWAYS
    assert len(sample.trained) == reads["records.py"] == 12


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.kind != "policy"])
def test_the_other_losses_read_nothing(name: str, reads: Counter[str]) -> None:
    _forward_and_backward(name)
    assert not reads


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_reads_nothing(name: str, reads: Counter[str]) -> None:
    """But for what a whole step does around it."""
    _forward_and_backward(name)
    assert not reads


def _forward_and_backward(name: str) -> None:
    """Of eight tokens, two for each of four sequences."""
    logprobs = ("policy_logprobs", "behaviour_logprobs", "proximal_logprobs", "reference_logprobs")
    tokens = {
        one: torch.empty(8, device=META, requires_grad=one in ("policy_logprobs", "values"))
        for one in (*logprobs, "advantages", "values", "anchor_values", "returns")
    }
    inputs = LossInputs(
        **tokens,
        cutoff=torch.empty((), device=META),
        mask=torch.empty(8, dtype=torch.bool, device=META),
        segment_ids=torch.empty(8, dtype=torch.int64, device=META),
        lengths=torch.empty(4, dtype=torch.int64, device=META),
        num_units=4,
        scores=torch.empty(4, device=META, requires_grad=True),
        labels=torch.empty(1, dtype=torch.int64, device=META),
        ratings=torch.empty(4, device=META),
        is_desirable=torch.empty(4, dtype=torch.bool, device=META),
        reference_kl=torch.empty((), device=META),
    )
    with CopiesToThere():
        loss, _ = loss_named(name, {})(inputs)
        torch.autograd.backward(loss)


def test_what_these_tests_refuse(reads: Counter[str]) -> None:
    """The oracle itself: it knows a look from the host, a wait inside an operator, and a copy that is waited for."""
    x = torch.empty(3, device=META)
    for look in (lambda: bool(x.sum() > 0), lambda: x.sum().item(), x.numpy, lambda: x[x > 0], lambda: x.unique()):
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            look()
    with pytest.raises(AssertionError), CopiesToThere():
        torch.zeros(3).to(META)
    assert x.tolist() == [1.0] * 3
    assert reads == {Path(__file__).name: 1}


def test_metrics_that_came_in_a_message_are_encoded_beside_those_on_the_device(reads: Counter[str]) -> None:
    """Those of a critic with an executor of its own lie on the CPU: the device is read once, for its own."""
    there = Mean(torch.ones((), device=META), torch.ones((), dtype=torch.int64, device=META))
    made = {"loss": there, "value_loss": Mean(torch.tensor(3.0), torch.tensor(4)), "ratio": there}
    found = decode_metrics(encode_metrics(made | {"largest": Max(torch.tensor(7.0))}))
    assert list(found) == ["loss", "value_loss", "ratio", "largest"]
    assert (found["value_loss"].value(), found["largest"].value()) == (0.75, 7.0)
    assert reads == {"reduce.py": 1}
