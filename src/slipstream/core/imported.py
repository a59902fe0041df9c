"""From the arguments of another trainer to a recipe: `trl grpo`'s, in a file as its --config takes, or as a dict.

Fields with a counterpart are converted, and TRL's defaults written where they decide what is trained. What is left is
noted, with the entries of `other_names.toml` as reasons. The tables are resolved once, so that a run takes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w
import yaml

from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.files import read_whole
from slipstream.core.other_names import DEFAULTS, FIELDS, NO_FIELD, SAME, sentence
from slipstream.core.plain import shown
from slipstream.core.recipes import MAX_TOML_BYTES, check_path, nested, resolve

Kind = Literal["set", "differs", "unused"]
NOTES: dict[Kind, str] = {
    "set": "to be set by you",
    "differs": "trained otherwise than in TRL",
    "unused": "not converted, and needed for nothing",
}
HELD_OUT = 32
_TRL, _SAME, _DEFAULTS = FIELDS["TRL"], SAME["TRL"], DEFAULTS["TRL"]
_REDUCTIONS = {
    "dapo": "token",
    "bnpo": "token",
    "cispo": "token",
    "grpo": "sequence",
    "sapo": "sequence",
    "dr_grpo": "constant",
}
"""TRL's `loss_type`s that there are, and what their sums are divided by."""
_SCHEDULES = {
    "constant_with_warmup": "constant",
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine",
    "polynomial": "linear",
}
"""The nearest schedule to each of transformers'; the last ones differ from it."""
_DIVIDED = {
    "entropy_coef": "TRL's bonus is the mean over tokens, here it is divided as the loss is; for dr_grpo that is as "
    "many times less as max_completion_length is more than the mean length",
    "mask_truncated_completions": "TRL divides by all completions, here by those that are trained on",
}
"""Where the divisor is of completions."""
_UNCAPPED = "weighs by the ratio of the policy to vLLM's own logprobs, without a cap; TRL's is to the trainer's"
_SUMMED = (
    "weighs as many times more as a completion has tokens: GSPO sums it over each completion, TRL takes the mean over "
    'tokens. The loss "aipo" with level = "geometric", max_ratio = inf and these epsilons has GSPO\'s gradient with '
    'loss.reduction = "sequence", and a mean'
)
_YOURS = {"trainer.recompute", "eval.num_slots", "eval.keep_best", "eval.metric", "seed", "deadline_s", "kl.sync_every"}
"""Fields that are left to the user where TRL's counterpart is given."""
_LAYERS = ["q_proj", "v_proj"]
_NUMBER, _TEXT, _TEXTS = (int, float), (str,), (str, list)
_TYPES: dict[str, tuple[type, ...]] = {
    "scale_rewards": (str, bool),
    "report_to": _TEXTS,
    "reward_funcs": _TEXTS,
    "lora_target_modules": _TEXTS,
    "datasets": (list,),
    "reward_weights": (list,),
    "model_init_kwargs": (dict,),
    "chat_template_kwargs": (dict,),
    **dict.fromkeys(("eval_strategy", "save_strategy"), (str, bool)),  # YAML reads `no` as false
    **dict.fromkeys(("bf16", "fp16", "gradient_checkpointing"), (bool,)),
    **dict.fromkeys(("model_name_or_path", "dataset_name", "dataset_config", "reward_model_name_or_path"), _TEXT),
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "max_grad_norm", "eval_steps", "save_steps", "delta"), _NUMBER),
    **dict.fromkeys([name for name in _TRL if name.startswith("vllm_importance_sampling_c")], _NUMBER),
    "vllm_importance_sampling_correction": (bool,),
}
"""What TRL takes, where its default does not say it."""
_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"function": "math"},
    "think_format_reward": {
        "function": "regex",
        "params": {"pattern": r"<think>(?!.*<think>).*?</think>.*", "full": True},
    },
    "get_soft_overlong_punishment": {"function": "length", "params": {"max_tokens": 1280, "buffer_tokens": 256}},
}


@dataclass(frozen=True)
class ImportNote:
    """A sentence that a conversion leaves about one `name` of the other trainer."""

    kind: Kind
    name: str
    why: str


@dataclass(frozen=True)
class ImportedConfig:
    """A recipe made of another trainer's arguments: its `tables`, `comments` by field, and what is left to say."""

    tables: dict[str, Any]
    comments: dict[str, str]
    notes: list[ImportNote]

    @property
    def toml(self) -> str:
        """Return the recipe as a file, with its comments and notes."""
        lines, section = ["# Converted from the arguments of TRL's GRPOTrainer by `slipstream import-config`."], ""
        for kind, title in NOTES.items():
            noted = [f"#   {note.name}: {note.why}" for note in self.notes if note.kind == kind]
            lines += [f"# {title[0].upper()}{title[1:]}:", *noted] if noted else []
        left = dict(self.comments)
        for line in ["", *tomli_w.dumps(self.tables).splitlines()]:
            if line.startswith("["):
                section = line.strip("[]") + "."
                name = section[:-1]
            else:
                name = section + line.partition(" = ")[0]
            if name in left:
                lines += [f"# {line}" for line in left.pop(name).splitlines()]
            lines.append(line)
        return "\n".join(lines) + "\n"


def import_config(source: str | Path | Mapping[str, Any], *, world: int = 1, rows: int | None = None) -> ImportedConfig:
    """Return the recipe that trains what `trl grpo` would have trained with the arguments in `source`.

    `source` is a YAML or JSON file as its --config takes, or a dict: fields of GRPOConfig, ModelConfig and the script's
    arguments. `world` is how many processes TRL was started with, `rows` how many prompts the data set has, from which
    `num_train_epochs` makes steps. ConfigError for what TRL does not know, or no recipe can express.
    """
    for what, count in (("world", world), ("rows", rows)):
        if count is not None and count < 1:
            raise ConfigError(f"'{what}' is a count", got=count, allowed="1 or more")
    given = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    conversion = _Conversion(given, world, rows)
    conversion.convert()
    return conversion.result()


def _read(path: Path) -> dict[str, Any]:
    """Return the arguments in a file. ConfigError where it cannot be read, or has no arguments."""
    check_path(path, "the file to import")
    try:
        found = yaml.safe_load(read_whole(path, MAX_TOML_BYTES).decode("utf-8"))  # JSON is YAML, too
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read", got=error.strerror, allowed="a YAML or JSON file") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"'{path}' is neither YAML nor JSON", got=text, hint="as `trl grpo --config` takes"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(
            f"'{path}' has no arguments", got=type(found).__name__, allowed="a mapping, such as `learning_rate: 1.0e-6`"
        )
    return found


@dataclass
class _Conversion:
    """Arguments `given` on their way to `fields` of a recipe, by dotted path; `used` are the names that were read."""

    given: dict[str, Any]
    world: int
    rows: int | None
    fields: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    notes: list[ImportNote] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.given = {name: _plain(value) for name, value in self.given.items()}
        known = _TRL.keys() | _SAME.keys() | {"env"}
        if unknown := [name for name in self.given if name not in known]:
            raise ConfigError(
                "`trl grpo` takes no such arguments",
                got=", ".join(unknown),
                allowed="fields of GRPOConfig, ModelConfig and the script's arguments (docs/from_trl.md)",
                hint=did_you_mean(unknown[0], known),
            )
        for name, value in self.given.items():
            kinds = _TYPES.get(name) or (type(_DEFAULTS[name]) if name in _DEFAULTS else object,)
            kinds = _NUMBER if kinds[0] in _NUMBER else kinds
            is_number = not isinstance(value, bool) or bool in kinds or object in kinds
            if value is not None and not (isinstance(value, kinds) and is_number):
                allowed = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigError(f"TRL's {name} has another type", got=shown(value), allowed=allowed)

    def value(self, name: str) -> Any:
        """Return what TRL takes for `name`: what is given, or its default."""
        self.used.add(name)
        found = self.given.get(name)
        return _DEFAULTS.get(name) if found is None else found

    def number(self, name: str, *, least: float = 0, is_whole: bool = True) -> Any:
        """Return the number that TRL takes for `name`; ConfigError where it is none, or below `least`."""
        found = self.value(name)
        kinds = int if is_whole else (int, float)
        if isinstance(found, float) and is_whole and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, kinds) or not found >= least:
            what = "an integer" if is_whole else "a number"
            raise ConfigError(f"TRL's {name} is out of range", got=shown(found), allowed=f"{what} >= {least}")
        return found

    def put(self, path: str, value: Any, why: str | None = None) -> None:
        self.fields[path] = value
        if why is not None:
            self.comments[path] = why

    def copy(self, *names: str) -> None:
        """Take the values as they are, for the fields that the table names; nothing for one that TRL leaves out."""
        for name in names:
            if (value := self.value(name)) is not None:
                self.put(_SAME.get(name) or _TRL[name].partition(", ")[0], value)

    def note(self, kind: Kind, name: str, why: str) -> None:
        self.notes.append(ImportNote(kind, name, why))

    def convert(self) -> None:
        self.copy("seed")
        self.put("max_staleness", 0, "TRL generates, trains and repeats. 1 or more steps overlap: docs/staleness.md.")
        self.put("weight_update", "between_batches")
        updates, per_epoch = self._batches()
        self._steps(updates, per_epoch)
        self._model()
        self._data()
        self._sampling()
        self._rewards()
        self._loss()
        self._advantages()
        self._optimizer(updates)
        self._trackers()
        self._leftovers()

    def result(self) -> ImportedConfig:
        """Return the recipe, which resolves, up to what the caller has to set."""
        tables = nested(self.fields)
        resolve(tables, {path: "to/be_set" for path in ("model.path", "prompts.dataset") if path not in self.fields})
        return ImportedConfig(tables, self.comments, self.notes)

    def _batches(self) -> tuple[int, int | None]:
        """Set the sizes of a step; return how many updates it has, and, of known rows, a pass over the data set."""
        per_device = self.number("per_device_train_batch_size", least=1)
        accumulation = self.number("gradient_accumulation_steps", least=1)
        samples, epochs = self.number("num_generations", least=2), self.number("num_iterations", least=1)
        batch, slices = self.value("generation_batch_size"), self.value("steps_per_generation")
        if batch is not None and slices is not None:
            raise ConfigError("TRL takes one of these", got="generation_batch_size and steps_per_generation")
        at_once = per_device * self.world
        slices = accumulation if slices is None else self.number("steps_per_generation", least=1)
        batch = slices * at_once if batch is None else self.number("generation_batch_size", least=1)
        slices = batch // at_once
        in_step = slices  # or, for an update over several batches, those of all: one policy samples them
        if slices and accumulation % slices == 0 and epochs == 1:
            in_step = accumulation
        if batch % at_once or batch % samples or in_step % accumulation:
            raise ConfigError(
                "TRL's batch does not divide",
                got=f"a batch of {batch} completions, groups of {samples}, updates of {accumulation} x {at_once}",
                allowed="whole groups in a batch, and whole updates",
                hint=f"--world, now {self.world}, is how many processes TRL was started with",
            )
        groups, minibatches = in_step * at_once // samples, in_step // accumulation
        why = f"{in_step} slices of per_device_train_batch_size = {per_device} on {self.world} processes"
        self.put("groups_per_step", groups, f"{why}, by num_generations = {samples}")
        self.copy("num_generations")
        why = f"{in_step} slices by gradient_accumulation_steps = {accumulation}"
        if minibatches > 1 and _REDUCTIONS.get(self.value("loss_type")) == "token":
            why += "; TRL divides by the tokens of the mean minibatch, we by those of each"
        self.put("trainer.minibatches", minibatches, why)
        self.copy("num_iterations")
        if self.rows is None:
            return minibatches * epochs, None
        return minibatches * epochs, math.ceil(self.rows // (batch // samples) * slices * epochs / accumulation)

    def _steps(self, updates: int, per_epoch: int | None) -> None:
        """Set the number of steps, of `updates` each, and how often they are evaluated and saved."""
        total = self.number("max_steps", least=-1)
        epochs = self.number("num_train_epochs", is_whole=False)
        why = f"max_steps = {total} updates, {updates} in a step"
        if total <= 0 and per_epoch is not None:
            total = math.ceil(epochs * max(1, per_epoch))
            why = f"num_train_epochs = {epochs:g} of {self.rows} rows: {total} updates, {updates} in a step"
        if total > 0:
            self.put("steps", math.ceil(total / updates), why)
        else:
            why = f"num_train_epochs = {epochs:g} needs the number of rows, --rows N (or max_steps); it is 100 now"
            self.note("set", "steps", why)
        for strategy, every, path in (
            ("eval_strategy", "eval_steps", "eval.every"),
            ("save_strategy", "save_steps", "trainer.checkpoint_every"),
        ):
            if strategy not in self.given and every not in self.given and strategy == "save_strategy":
                continue
            chosen, count = self.value(strategy), self.value(every)
            is_share = isinstance(count, float) and 0 < count < 1  # of all updates
            if chosen == "best":
                self.note("set", "eval.keep_best", f"{strategy} = best keeps the best evaluation's model, not the last")
            elif chosen == "epoch" and per_epoch is not None:
                self.put(path, max(1, math.ceil(per_epoch / updates)), f"{strategy} = epoch")
            elif chosen == "steps" and not (is_share and total <= 0):
                count = self.number("logging_steps", is_whole=False) if count is None else count
                count = count * total if is_share else count
                self.put(path, max(1, math.ceil(count / updates)), f"{every}: {count:g} updates")
            elif chosen in ("no", False):
                self.put(path, 0)
            else:
                self.note("set", path, f"{strategy} = {chosen} needs the number of rows, --rows N")

    def _model(self) -> None:
        if self.value("model_name_or_path") is None:
            self.note("set", "model.path", "the file names no model (model_name_or_path)")
        self.copy("model_name_or_path")
        kwargs = self.value("model_init_kwargs") or {}
        revision = kwargs.get("revision") or self.value("model_revision")
        if revision not in (None, "main"):
            self.put("model.revision", revision)
        device = "cpu" if self.value("use_cpu") else "cuda"
        if self.value("use_peft"):
            self._adapters()
        self.put("trainer.device", device, "TRL takes a GPU if there is one; `slipstream plan` divides several.")
        if not self._takes_vllm:
            self.put("generator.device", device)
        is_bf16 = self.value("bf16") is not False and not self.value("fp16")
        if self.value("fp16"):
            self.note("differs", "fp16", "there is no float16: it computes in float32")
        if device == "cuda" and is_bf16:
            self.put("trainer.precision", "bfloat16", "bf16, which TRL takes unless fp16 is given")
        if "gradient_checkpointing" in self.given:  # which TRL does by default: it costs time, and changes nothing
            self.put("trainer.recompute", bool(self.value("gradient_checkpointing")))

    def _adapters(self) -> None:
        self.copy("lora_r", "lora_alpha", "use_rslora")
        layers = self.value("lora_target_modules")
        why = "PEFT's choice for Llama, Mistral and Qwen where lora_target_modules is not given" * (layers is None)
        layers = _LAYERS if layers is None else [layers] if isinstance(layers, str) else layers
        self.put("model.lora.targets", [] if layers == ["all-linear"] else layers, why or None)
        if dropout := self.value("lora_dropout"):
            self.note("differs", "lora_dropout", f"{dropout:g} in TRL; adapters are trained without dropout")

    def _data(self) -> None:
        several = self.value("datasets") or []
        if len(several) == 1 and isinstance(several[0], Mapping):
            own = {"path": "dataset", "name": "dataset_config", "split": "dataset_split"}
            for name, value in several[0].items():
                if name in own and value is not None:
                    self.put(f"prompts.{own[name]}", value)
                elif value is not None:
                    self.note("set", f"datasets.{name}", "a data set is read as it is: prepare it beforehand")
        elif several:
            self.note("set", "prompts.dataset", "several data sets are joined beforehand")
        else:
            self.copy("dataset_name", "dataset_config", "dataset_train_split")
            if "prompts.dataset" not in self.fields:
                self.note("set", "prompts.dataset", "the file names no data set (dataset_name)")
        if self.value("dataset_streaming") or self.value("streaming"):
            self.put("prompts.streaming", True)
        self.put("prompts.num_train", 2**31 - 1, "all prompts that are not held out")
        held_out = HELD_OUT if self.rows is None else min(HELD_OUT, max(1, self.rows // 10))
        self.put(
            "prompts.num_eval", held_out, "TRL holds none out of the training split; greedy answers measure the run"
        )
        self.put("eval.num_prompts", held_out)
        if self.value("eval_strategy") not in ("no", False):
            why = "evaluations are of these held-out prompts, not of the split dataset_test_split"
            self.note("differs", "eval_strategy", why)
        if not self.value("shuffle_dataset"):
            self.note("differs", "shuffle_dataset", "prompts are always shuffled, by `seed`")
        self.copy("max_prompt_length", "chat_template_kwargs")
        if self.given.get("max_prompt_length") is not None:
            why = 'TRL cut longer prompts from the left; they are dropped and counted (or prompts.too_long = "cut")'
            self.note("differs", "max_prompt_length", why)

    @property
    def _takes_vllm(self) -> bool:
        return bool(self.value("use_vllm")) and not self._truncates

    @property
    def _truncates(self) -> bool:
        return bool(self.value("top_k") or self.value("top_p") < 1 or self.value("min_p"))

    def _sampling(self) -> None:
        self.copy("max_completion_length", "temperature", "top_p", "top_k", "min_p")
        if self._truncates:
            why = "ratios are over the tokens that were sampled from; in TRL over the whole vocabulary"
            self.put("generator.keep_sets", True, why)
            self.note("differs", "top_k, top_p, min_p", why)
            top_k = self.fields["generator.top_k"]
            if not 1 <= top_k <= 512:
                self.put("generator.top_k", 512, f"{top_k} in TRL: the tokens to sample from are recorded")
        if self._takes_vllm:
            self._vllm()
        elif self.value("use_vllm"):
            self.note("differs", "use_vllm", "the native engine: vLLM does not record the tokens to sample from")

    def _vllm(self) -> None:
        self.put("generator.engine", "vllm")
        given = ("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_server_timeout")
        self.copy(*(name for name in (*given, "vllm_tensor_parallel_size") if name in self.given))
        if "vllm_model_impl" in self.given:
            self.put("generator.vllm.engine_args", {"model_impl": self.value("vllm_model_impl")})

    def _rewards(self) -> None:
        functions, model = self.value("reward_funcs") or [], self.value("reward_model_name_or_path")
        functions = [functions] if isinstance(functions, str) else functions
        count = len(functions) + (model is not None)
        weights = self.value("reward_weights") or [1] * count
        if len(weights) != count or not all(isinstance(one, _NUMBER) for one in weights):
            raise ConfigError("TRL takes a weight for each reward", got=f"{shown(weights)} for {count}")
        if not count:
            self.note("set", "rewards.terms", "the file names no reward_funcs; in Python: slipstream.run(reward=[...])")
            return
        if model is not None:
            self.put("rewards.models", [{"path": model, "weight": float(weights[0])}])
        terms = []
        for name, weight in zip(functions, weights[count - len(functions) :], strict=True):
            module, _, function = name.rpartition(".")
            if name in _REWARDS:
                terms.append({**_REWARDS[name], "weight": float(weight)})
            elif module:  # in the working folder, which TRL looks through first, or installed
                file = Path(*module.split(".")).with_suffix(".py")
                is_alone = file.is_file() and not file.with_name("__init__.py").is_file()  # else it may import siblings
                module = file.as_posix() if is_alone else module
                terms.append({"function": f"{module}:{function}", "per": "group", "weight": float(weight)})
            else:
                allowed = f"{', '.join(_REWARDS)}, or MODULE.FUNCTION"
                raise ConfigError(f"there is no counterpart of TRL's reward '{name}'", got=name, allowed=allowed)
        if "accuracy_reward" in functions:
            self.put("prompts.answer_column", "solution")
            why = "answers are found by math_verify's own rules; TRL's takes the first LaTeX alone"
            self.note("differs", "accuracy_reward", why)
        self.put("rewards.terms", terms)

    def _loss(self) -> None:
        kind, level = self.value("loss_type"), self.value("importance_sampling_level")
        low = self.number("epsilon", is_whole=False)
        high = low if self.value("epsilon_high") is None else self.number("epsilon_high", is_whole=False)
        is_clip = kind in ("grpo", "bnpo", "dr_grpo", "dapo")
        if kind not in _REDUCTIONS or level not in ("token", "sequence") or (kind == "sapo" and level == "sequence"):
            raise ConfigError(
                "there is no such loss here",
                got=f"loss_type = {shown(kind)} with importance_sampling_level = {shown(level)}",
                allowed=f"{', '.join(_REDUCTIONS)}, sapo with 'token' alone",
                hint="docs/algorithms.md has the losses that there are",
            )
        reduction = _REDUCTIONS[kind]
        if kind == "bnpo":
            reduction = "sequence" if self.value("per_device_train_batch_size") == 1 else "token"
            if reduction == "token" and self.value("gradient_accumulation_steps") * self.world > 1:
                self.note("differs", "loss_type", "bnpo divides by the tokens of a slice in TRL, here of an update")
        if kind == "cispo":
            params = {"max_ratio": high, "level": "token" if level == "token" else "geometric"}
            self.put("loss.name", "aipo", "CISPO clips the ratio itself at epsilon_high in TRL: AIPO's truncation")
        elif kind == "sapo":
            self.put("loss.name", "sapo")
            params = {"tau_pos": self.value("sapo_temperature_pos"), "tau_neg": self.value("sapo_temperature_neg")}
        elif level == "sequence":
            self.put("loss.name", "gspo", f"loss_type = {kind} with importance_sampling_level = sequence")
            params = {"eps_low": low, "eps_high": high}
            if kind != "grpo":
                self.note("differs", "loss_type", f"{kind} weighs sequences by their length, GSPO counts each once")
            reduction = "token"  # of whole completions: there are no tokens to reduce
        else:
            self.put("loss.name", "grpo", f"loss_type = {kind}, with TRL's clip")
            params = {"eps_low": low, "eps_high": high}
        self.put("loss.params", params)
        self.put("loss.reduction", reduction)
        self._bounds(is_token_clip=is_clip and level == "token", high=high)
        self.copy("entropy_coef")
        self.put("loss.truncated", "mask" if self.value("mask_truncated_completions") else "keep")
        if level == "token" and kind in ("grpo", "sapo", "dr_grpo"):
            for name, why in _DIVIDED.items():
                if self.value(name):
                    self.note("differs", name, why)
        self.put("loss.skip_no_signal", False, "TRL trains on groups of equal rewards, too")
        self._kl()

    def _bounds(self, *, is_token_clip: bool, high: float) -> None:
        """Set the bounds beside the clip: delta, and the correction for vLLM's own logprobs."""
        delta, params = self.value("delta"), self.fields["loss.params"]
        if delta is not None and is_token_clip and delta > 1 + high:
            self.put("loss.name", "ppo", "delta is PPO's dual clip")
            params["dual_clip"] = float(delta)
        elif delta is not None:
            self.note("differs", "delta", "a dual clip goes with a clip of tokens, above 1 + epsilon_high")
        cap = self.value("vllm_importance_sampling_cap")
        most = self.value("vllm_importance_sampling_clip_max") if cap is None else cap
        least, mode = self.value("vllm_importance_sampling_clip_min"), self.value("vllm_importance_sampling_mode")
        is_corrected = self.value("vllm_importance_sampling_correction")
        if not self._takes_vllm:
            return
        if not is_corrected or not is_token_clip or delta is not None:
            why = "the ratio is that of the policy to vLLM's own logprobs"
            self.note("differs", "vllm_importance_sampling_correction", why)
            return
        self.put("loss.name", "decoupled_ppo", "with TRL's correction for vLLM's logprobs")
        params |= {"max_ratio": math.inf if most is None else float(most), "mode": str(mode).rpartition("_")[2]}
        if least is not None and params["mode"] == "mask":
            self.put("loss.name", "icepop", "with TRL's correction for vLLM's logprobs")
            del params["mode"]
            params["min_ratio"] = float(least)
        elif least is not None:
            self.note("differs", "vllm_importance_sampling_clip_min", "weights are truncated from above only")
        if str(mode).startswith("sequence"):
            self.note("differs", "vllm_importance_sampling_mode", "the correction is of tokens, not of sequences")

    def _kl(self) -> None:
        beta = self.number("beta", is_whole=False)
        self.put("kl.coef", float(beta))
        if beta:
            self.put("kl.place", "loss")
            self.put("kl.estimator", "k3")
            self.put("kl.corrected", bool(self.value("use_bias_correction_kl")))
            if self._takes_vllm and self.fields["kl.corrected"]:
                self.note("differs", "use_bias_correction_kl", _UNCAPPED)
        if self.fields["loss.name"] == "gspo":
            for name in ("beta", "entropy_coef"):
                if self.value(name):
                    self.note("differs", name, _SUMMED)

    def _advantages(self) -> None:
        scale = {True: "group", False: "none"}.get(self.value("scale_rewards"), self.value("scale_rewards"))
        how = self.value("multi_objective_aggregation")
        if scale not in ("group", "batch", "none") or how not in ("sum_then_normalize", "normalize_then_sum"):
            raise ConfigError(
                "TRL has no such advantages", got=f"scale_rewards = {shown(scale)}, multi_objective_aggregation = {how}"
            )
        normalises = how == "normalize_then_sum"
        self.put("loss.advantages", "group_normalised" if scale == "group" or normalises else "group_mean")
        self.put("loss.several_rewards", "normalise_then_sum" if normalises else "sum_then_normalise")
        self.put("loss.std_eps", 1e-4, "TRL's")
        self.put("loss.unbiased_std", True)
        if normalises or scale == "batch":
            self.put("loss.whiten_advantages", "batch")
            self.put("loss.whiten_unbiased", True)
            name = "multi_objective_aggregation" if normalises else "scale_rewards"
            self.note("differs", name, "the batch's deviation is over tokens, not over completions")

    def _optimizer(self, updates: int) -> None:
        self.copy("learning_rate", "adam_epsilon", "weight_decay")
        self.put("trainer.optimizer.betas", [self.value("adam_beta1"), self.value("adam_beta2")])
        limit = self.value("max_grad_norm") or math.inf
        self.put("trainer.optimizer.max_grad_norm", float(limit))
        if (name := self.value("optim")) not in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"):
            self.note("differs", "optim", f"AdamW takes the place of {name}")
        kind, warmup = self.value("lr_scheduler_type"), self.value("warmup_steps")
        share = self.value("warmup_ratio") or (warmup if 0 < warmup < 1 else 0)
        schedule = _SCHEDULES.get(kind, "constant")
        if kind not in list(_SCHEDULES)[:4]:
            why = f"{schedule} takes the place of {kind}" + ", and ends at 0" * (schedule != "constant")
            self.note("differs", "lr_scheduler_type", why)
        self.put("trainer.optimizer.schedule", schedule, f"lr_scheduler_type = {kind}")
        if share and not warmup >= 1 and "steps" not in self.fields:
            self.note("set", "trainer.optimizer.warmup_updates", f"{share:g} of all updates, whose number is not known")
        elif share and not warmup >= 1:
            warmup = math.ceil(share * self.fields["steps"] * updates)
        warmup = 0 if kind == "constant" or warmup < 1 else warmup
        first = "transformers' first update has a rate of 0, ours of 1 / warmup_updates" if warmup else None
        self.put("trainer.optimizer.warmup_updates", int(warmup), first)

    def _trackers(self) -> None:
        names = self.value("report_to")
        names = [names] if isinstance(names, str) else names
        known = {"tensorboard", "wandb", "trackio", "mlflow"}
        if chosen := [name for name in names if name in known]:
            self.put("trackers.names", chosen)
            self.copy("project", "run_name")
        if left := [name for name in names if name not in known | {"none"}]:
            self.note("unused", "report_to", f"{', '.join(left)}: there are {', '.join(sorted(known))}")

    def _leftovers(self) -> None:
        """Note what is given and was not read, but for what TRL would have taken anyway."""
        if "env" in self.given:
            self.note("set", "env", "variables of the environment are those of the command")
        if self.value("save_total_limit") is not None:
            self.copy("save_total_limit")
        spread = ["--world"] * (self.world > 1)
        for name, value in self.given.items():
            is_default = value in (None, "", [], {}) or value == _DEFAULTS.get(name, False)
            if name in self.used or name == "env" or is_default:
                continue
            mark, _, why = _TRL.get(name, "").partition(", ")
            if mark == "trainer.ranks":
                spread.append(name)
                continue
            why = why if mark in NO_FIELD else sentence(name) or f"is `{_SAME[name]}` here"
            self.note("differs" if mark == "!" else "set" if mark in _YOURS else "unused", name, why)
        if spread:
            shards = (
                f"one device now; trainer.ranks = {self.world} shards the trainer (FSDP2)"
                if self.world > 1
                else "one device, as --world says; trainer.ranks shards the trainer (FSDP2)"
            )
            more = f"{', '.join(spread)}: {shards}, beside generator.replicas: `slipstream plan`"
            self.note("set", "trainer.ranks", more)


def _plain(value: Any) -> Any:
    """Return `value` as TRL's parser reads it: YAML has no number 1e-6, and tables may be texts of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.startswith("{") else float(value) if "e" in value.lower() else value
    except ValueError:
        return value


def told(notes: list[ImportNote]) -> Iterator[tuple[Kind, str]]:
    """Yield a line for each of the `notes`, of one kind after the other."""
    for kind, title in NOTES.items():
        yield from ((kind, f"{title}: {note.name}: {note.why}") for note in notes if note.kind == kind)
