"""TRL scripts, ported: `environment_factory` and `tools` as GRPOTrainer has them (docs/from_trl.md).

    python examples/from_trl.py [RUN_DIR]

A random model with a chat template of its own plays: it calls tools by chance, and learns to.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import slipstream
from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import char_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}\n{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}


class Counter:
    """An environment of TRL: its public methods are tools."""

    def reset(self, target: int, **_: Any) -> str:
        self.count, self.target = 0, target
        return f" Count to {target}."

    def increment(self, step: int) -> int:
        """Increase the counter.

        Args:
            step: What to add.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count == self.target)


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def answered(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """Reward short last turns. As in TRL, a completion is the list of messages after the prompt."""
    return [1.0 / (1 + len(messages[-1]["content"])) for messages in completions]


def make_checkpoint(folder: Path) -> Path:
    """Write a random model that reads and writes single characters, with a chat template that knows tools."""
    tokenizer = char_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = TEMPLATE
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = new_model(ModelConfig(**SIZES, max_positions=256), len(tokenizer), 0, eos_token_id=eos, pad_token_id=pad)
    save_model(model, folder, tokenizer)
    return folder


def main(out: str | None = None) -> list[slipstream.Result]:
    """Train with `environment_factory`, then with `tools`; returns both runs."""
    folder = Path(tempfile.mkdtemp()) if out is None else Path(out)
    config = {
        "steps": 2,
        "groups_per_step": 2,
        "completions_per_group": 4,
        "model": {"path": str(make_checkpoint(folder / "checkpoint"))},
        "prompts": {"chat": True},
        "generator": {"max_new_tokens": 8, "num_slots": 8},
        "environment": {"max_turns": 3, "tool_format": "json_tags"},
        "loss": {"skip_no_signal": False},
    }
    rows = [{"prompt": f"Game {n}.", "target": n % 5} for n in range(32)]
    counting = slipstream.run(config, environment_factory=Counter, prompts=rows, out=folder / "factory")
    adding = slipstream.run(config, tools=[add], reward=answered, prompts=rows, out=folder / "tools")
    return [counting, adding]


if __name__ == "__main__":
    for result in main(*sys.argv[1:2]):
        print(f"{result.status}: {result.summary['steps']} steps; report: {result.out / 'report.html'}")
