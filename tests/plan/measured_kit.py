"""Made-up measured curves, so plain that what follows from them can be computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import msgspec

from slipstream.core.recipes import resolve
from slipstream.models.config import TransformerConfig
from slipstream.plan.measured import FORMAT, EtaCurve, MeasuredCurves, MeasuredModel, Point, Together

BATCHES = (1, 8, 64)


def quickstart_shape() -> TransformerConfig:
    """That of the recipe, whose tokenizer has 95 printable characters, a newline and three specials."""
    model = resolve("quickstart").model
    return TransformerConfig(
        family=model.family,
        vocab_size=99,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.hidden_size // model.num_heads,
        max_positions=model.max_positions,
        tie_embeddings=model.tie_embeddings,
    )


def points(seconds: Callable[[int], float]) -> tuple[Point, ...]:
    return tuple(
        Point(batch=batch, seconds=seconds(batch), low=0.9 * seconds(batch), high=1.1 * seconds(batch))
        for batch in BATCHES
    )


def measured(
    shape: TransformerConfig,
    *,
    train_s: Callable[[int, int], float] = lambda cores, _: 0.010 / cores,
    generate_s: Callable[[int, int], float] = lambda cores, _: 0.005 / cores,
    update_s: float = 0.0,
    together: tuple[Together, ...] = (),
    device: str = "cpu",
) -> MeasuredCurves:
    """Samples of 6 + 5 tokens (10 rows): on one core 1 ms a row trained, 1 ms a token generated, half on two."""
    curves = [
        EtaCurve(
            side=side,
            devices=cores,
            precision="float32",
            points=points(
                lambda batch, side=side, cores=cores: {"trainer": train_s, "generator": generate_s}[side](cores, batch)
            ),
            update_s=update_s if side == "trainer" else 0.0,
        )
        for side in ("trainer", "generator")
        for cores in (1, 2)
    ]
    model = MeasuredModel(
        name="made up",
        shape=msgspec.json.decode(msgspec.json.encode(asdict(shape))),
        num_params=1,
        prompt_tokens=6,
        completion_tokens=5,
        curves=tuple(curves),
        together=together,
    )
    return MeasuredCurves(
        format=FORMAT,
        command="python benchmarks/eta_curves.py",
        commit="0" * 40,
        device=device,
        num_devices=2,
        hardware={"CPU": "A <CPU>", "GPUs": "none"},
        models=(model,),
    )
