"""The judge that a configuration names."""

from __future__ import annotations

from slipstream.controller.pipeline import resolve_import
from slipstream.core.errors import ConfigError
from slipstream.core.stage_sections import JudgeConfig
from slipstream.evals.judge import EndpointJudge, Judge


def build_judge(config: JudgeConfig) -> Judge:
    """A function by its import path, or a model behind an endpoint. ConfigError unless exactly one is given."""
    if (config.function is None) == (config.base_url is None):
        raise ConfigError(
            "a judge is a function or an endpoint",
            got=f"function = {config.function!r}, base_url = {config.base_url!r}",
            allowed="one of the two",
        )
    if config.function is not None:
        try:
            found = resolve_import(config.function)
        except (ImportError, SyntaxError) as error:
            raise ConfigError(
                f"the judge '{config.function}' cannot be imported",
                got=error,
                allowed="'module:function' or 'path/to/file.py:function'",
                hint="is it installed in this environment, or on PYTHONPATH?",
            ) from error
        if not callable(found):
            raise ConfigError(f"the judge '{config.function}' is no function", got=repr(found)[:80])
        return found
    assert config.base_url is not None
    return EndpointJudge(
        base_url=config.base_url,
        model=config.model,
        api_key_env=config.api_key_env,
        criterion=config.criterion,
        deadline_s=config.deadline_s,
    )
