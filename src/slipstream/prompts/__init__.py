"""Tasks and datasets, templates, and a resumable stream of prompts."""

from slipstream.prompts.build import (
    PromptReport,
    PromptSet,
    build_prompts,
    count_overlap,
    demonstrations,
    held_out_prompts,
    prompts_that_fit,
)
from slipstream.prompts.stream import PromptStream
from slipstream.prompts.tasks import task_names, task_table

__all__ = [
    "PromptReport",
    "PromptSet",
    "PromptStream",
    "build_prompts",
    "count_overlap",
    "demonstrations",
    "held_out_prompts",
    "prompts_that_fit",
    "task_names",
    "task_table",
]
