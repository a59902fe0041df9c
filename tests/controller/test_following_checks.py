"""A reference that cannot follow the policy is refused before a run."""

from __future__ import annotations

import pytest

from slipstream.controller.checks import check_following
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.models.build import build_policy, build_tokenizer
from slipstream.models.hf import save_model
from slipstream.trainer.loss_checks import check_loss

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
FOLLOWING = {"coef": 0.1, "sync_every": 8}


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ({"kl": FOLLOWING | {"executor": "own"}}, "between two steps, in the trainer"),
        ({"kl": FOLLOWING, "model": {"lora": {"rank": 4}}}, "since it is their base"),
        ({"kl": FOLLOWING | {"mixup": 0.0}}, "kl.mixup"),
        ({"kl": FOLLOWING | {"mixup": 1.5}}, "kl.mixup"),
        ({"kl": {"sync_every": 8}}, "nothing compares the policy with the reference"),
    ],
)
def test_what_cannot_follow_is_refused(tables, what):
    with pytest.raises(ConfigError, match=what):
        check_loss(resolve("quickstart", tables))


def test_a_reference_of_other_sizes_is_refused(tmp_path):
    policy = resolve("quickstart", {"model": SMALL, "kl": FOLLOWING})
    for name, changes in (("same", {}), ("deeper", {"num_layers": 3})):
        model = policy.model.model_copy(update=changes)
        save_model(build_policy(model, seed=1)[0], tmp_path / name, build_tokenizer(model))
    same, deeper = (
        resolve("quickstart", {"model": SMALL, "kl": FOLLOWING | {"reference": str(tmp_path / name)}})
        for name in ("same", "deeper")
    )
    check_following(same)
    with pytest.raises(ConfigError, match=r"has the policy's weights[\s\S]*layers.2"):
        check_following(deeper)
