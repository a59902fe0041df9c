"""Record the fields of `trl grpo` with their defaults: which exist is asked of the installed TRL, once per release.

    .venv-trl/bin/python scripts/record_trl_fields.py > tests/data/trl_grpo_fields.json

`make bench` installs that environment. Of each class (script arguments, GRPOConfig with TrainingArguments in it,
ModelConfig, mixtures of data sets) the names are written in its order, with defaults before `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import transformers
import trl
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import DatasetMixtureConfig

CLASSES = (GRPOScriptArguments, trl.GRPOConfig, trl.ModelConfig, DatasetMixtureConfig)


def default_of(field: dataclasses.Field) -> object:
    """Return the default of `field` as JSON has it: what a factory makes, and enumerations by their words."""
    made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    value = getattr(made, "value", made)
    return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)


def main() -> None:
    """Write the fields of all classes to stdout, with the versions that they are of."""
    classes = {
        one.__name__: {field.name: default_of(field) for field in dataclasses.fields(one) if field.init}
        for one in CLASSES
    }
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    json.dump(versions | {"classes": classes}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
