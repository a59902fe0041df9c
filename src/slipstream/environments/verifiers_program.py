"""An environment of Prime Intellect's `verifiers` 0.4, by its name, as a program that plays episodes.

    .venv-verifiers/bin/python verifiers_program.py --environment NAME [--parameters JSON]      # play: lines below
    .venv-verifiers/bin/python verifiers_program.py --environment NAME --tasks 100              # rows of a data set

Runs in an environment of its own (`make verifiers-env`), without Slipstream. One JSON object a line, many episodes at
a time; the end of standard input ends the program:

    in:   {"episode": 17, "row": {"task": ...}, "base_url": "http://127.0.0.1:4711/s/KEY/v1", "api_key": "KEY"}
          {"cancel": 17}
    out:  {"ready": true}
          {"episode": 17, "reward": 0.5, "metrics": {...}}  or  {"episode": 17, "error": "a sentence"}

The policy is asked at `base_url` + /chat/completions, without a stream. What is wrong with the arguments is one line
on standard error, with exit code 2. Whatever the environment itself prints goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import difflib
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import pkgutil
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import IO, Any, TextIO

INSTALL = "in a checkout, `make verifiers-env` makes .venv-verifiers, with verifiers 0.4.0"
MAX_LINE_BYTES = 16 * 1024**2
MAX_EPISODES = 1024
MAX_METRICS = 64
MAX_ERROR_CHARS = 500
CONNECT_LIMIT_S = 60.0
END_LIMIT_S = 20.0
LOOP = "slipstream_policy_loop"
"""The id under which verifiers finds our harness."""
ENDS = ("max_turns", "episode_limit")
"""Codes of refusals that end a conversation, besides verifiers' own words for a full context."""
POLICY_URL = "http://slipstream.invalid/v1"
"""The address of the policy in verifiers' configuration; each episode's own takes its place."""

Play = Callable[[Mapping[str, Any], str, str], Awaitable[tuple[float | None, dict[str, float]]]]
SESSION: ContextVar[tuple[str, str]] = ContextVar("SESSION")
"""Address and key of the episode that the current asyncio task plays."""


class WrongArgument(Exception):
    """Say what cannot be of what the user asked for, in a sentence or two."""


class EpisodeLost(Exception):
    """Say why an episode has no reward."""


def main() -> int:
    """Play episodes, or print tasks. The exit code is 2 where the arguments are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--environment", required=True, help="name of a bundled environment, or of an installed one")
    parser.add_argument("--parameters", default="{}", help="JSON object: fields of its task set, or of the environment")
    parser.add_argument("--model", default="policy", help="the model's name in requests")
    parser.add_argument("--path", action="append", default=[], metavar="DIR", help="where environments may lie, too")
    parser.add_argument("--tasks", type=int, metavar="N", help="print its first N tasks as rows, and end")
    options = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]  # our files are not environments
    sys.path += options.path
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print: their words are no answers
    try:
        parameters = read_parameters(options.parameters)
        check_version()
        if options.tasks is None:
            return asyncio.run(answer_lines(options.environment, parameters, options.model, out))
        if options.tasks < 1:
            raise WrongArgument(f"--tasks is {options.tasks}; it is 1 or more")
        for row in rows(options.environment, parameters, options.tasks):
            out.write(json.dumps(row) + "\n")
        out.flush()
    except WrongArgument as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except BrokenPipeError:  # nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return 0


def read_parameters(text: str) -> dict[str, Any]:
    try:
        parameters = json.loads(text)
    except ValueError as error:
        raise WrongArgument(f"--parameters is no JSON: {error}") from None
    if not isinstance(parameters, dict):
        raise WrongArgument(f"--parameters is a {type(parameters).__name__}; it is a JSON object")
    return parameters


def check_version() -> None:
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise WrongArgument(f"{sys.executable} has no package verifiers; {INSTALL}") from None
    if version.split(".")[:2] != ["0", "4"]:
        raise WrongArgument(f"verifiers is {version}; this program is written for 0.4; {INSTALL}")


# ------------------------------------------------------------------------------------------------- lines


async def answer_lines(name: str, parameters: dict[str, Any], model: str, out: TextIO) -> int:
    """Load the environment, say that it is ready, and answer the lines of standard input until it ends."""
    async with loaded(name, parameters, model) as play:
        # A reader of its own: at the end a thread may still wait for a line of it.
        await Desk(play, out).run(os.fdopen(os.dup(0), "rb"))
        end = threading.Timer(END_LIMIT_S, os._exit, (1,))
        end.daemon = True
        end.start()
    return 0


class Desk:
    """Reads lines, plays an episode for each in an asyncio task of its own, and writes one line for each.

    Consumes lines; waits for the next one; is unblocked by the thread that reads; ends with the end of the input, or
    SIGTERM. Episodes that are open then are cancelled.
    """

    def __init__(self, play: Play, out: TextIO) -> None:
        self._play, self._out = play, out
        self._episodes: dict[int, asyncio.Task[None]] = {}

    async def run(self, lines: IO[bytes]) -> None:
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.suppress(NotImplementedError, RuntimeError):  # no main thread: a test
            loop.add_signal_handler(signal.SIGTERM, is_over.set)

        def read() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                while line := lines.readline(MAX_LINE_BYTES + 1):
                    asyncio.run_coroutine_threadsafe(self.take(line), loop).result()
                loop.call_soon_threadsafe(is_over.set)

        self._write({"ready": True})
        threading.Thread(target=read, daemon=True).start()
        await is_over.wait()
        open_ones = list(self._episodes.values())
        for episode in open_ones:
            episode.cancel()
        if open_ones:
            await asyncio.wait(open_ones, timeout=END_LIMIT_S)

    async def take(self, line: bytes) -> None:
        """Begin or cancel an episode, as `line` says; a line that says neither is named on standard error."""
        try:
            ask = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
        except (ValueError, RecursionError):
            ask = None
        ask = ask if isinstance(ask, dict) else {}
        ended, number = number_in(ask, "cancel"), number_in(ask, "episode")
        if ended is not None:
            if (episode := self._episodes.get(ended)) is not None:
                episode.cancel()
        elif number is not None and number not in self._episodes:
            if len(self._episodes) >= MAX_EPISODES:
                self._write({"episode": number, "error": f"{MAX_EPISODES} episodes are open: no more at a time"})
                return
            self._episodes[number] = asyncio.create_task(self._answer(number, ask))
        else:
            sys.stderr.write(f"a line that is no new episode and no cancel: {line[:200]!r}\n")

    async def _answer(self, number: int, ask: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"episode": number}
        try:
            row, base_url, key = ask.get("row"), ask.get("base_url"), ask.get("api_key")
            if not (isinstance(row, dict) and isinstance(base_url, str) and isinstance(key, str)):
                raise EpisodeLost("the line needs row (an object), base_url and api_key (texts)")
            reward, metrics = await self._play(row, base_url, key)
            answer |= {"reward": reward} | ({"metrics": metrics} if metrics else {})
        except asyncio.CancelledError:
            answer["error"] = "the episode was cancelled"
        except Exception as error:  # noqa: BLE001 - one episode's: the others go on
            answer["error"] = in_one_line(error)
        del self._episodes[number]
        self._write(answer)

    def _write(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the end of the input follows
            self._out.write(json.dumps(answer) + "\n")
            self._out.flush()


def number_in(ask: Mapping[str, Any], field: str) -> int | None:
    value = ask.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def in_one_line(error: BaseException) -> str:
    kind = "" if isinstance(error, EpisodeLost) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:MAX_ERROR_CHARS]


# ------------------------------------------------------------------------------------------------- environments


@contextlib.asynccontextmanager
async def loaded(name: str, parameters: dict[str, Any], model: str) -> AsyncIterator[Play]:
    """Yield what plays an episode of the environment; its shared tool servers and the model server run meanwhile."""
    config = configured(name, parameters)
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment

    with named_problems(name):
        env = load_environment(config)
    policy = EvalClientConfig(base_url=POLICY_URL, api_key_var="SLIPSTREAM_SESSION")
    context = ModelContext(model=model, client=policy)
    await check_seats(name, env, context)
    task_class = type(env.taskset).task_type()

    async def play(row: Mapping[str, Any], base_url: str, key: str) -> tuple[float | None, dict[str, float]]:
        task = task_of(row, task_class, env.config.taskset.task)
        SESSION.set((base_url, key))
        return verdict(await env.run_episode(task, context), policy)

    async with env.serving():
        env._interception = by_session(env._interception, policy)
        yield play


def configured(name: str, parameters: dict[str, Any]) -> Any:
    """Return verifiers' configuration of the environment `name`.

    A parameter that is a field of the environment (a seat such as `agent`, `timeout`, `id`, ...) goes there; every
    other one is a field of its task set.
    """
    from pydantic import ValidationError
    from verifiers.v1.utils.loaders import env_config_type, taskset_class, taskset_config_type

    with named_problems(name):
        taskset_class(name)
        kind = env_config_type(name, parameters.get("id") or "")
        spare_repeats()
    register_loop()
    own = parameters.get("taskset", {})
    if not isinstance(own, dict):
        raise WrongArgument(f"the parameter 'taskset' is {own!r}; it is an object")
    given = {key: value for key, value in parameters.items() if key in kind.model_fields}
    rest = {key: value for key, value in parameters.items() if key not in kind.model_fields}
    fixed = {"taskset": own | rest | {"id": name}, "interception": {"type": "server"}}
    try:
        return kind.model_validate(given | seats(name, kind, given) | fixed)
    except ValidationError as error:
        known = {*kind.model_fields, *taskset_config_type(name).model_fields} - {*fixed, "id"}
        raise WrongArgument(f"parameters of '{name}': {problems(error, sorted(known))}") from None


def spare_repeats() -> None:
    """Take from TextArena what it does again for each game, for seconds in which all episodes wait.

    It asks the network for words that are here, and reads its dictionaries, which nothing changes.
    """
    if "textarena" not in sys.modules:
        return
    import nltk
    from textarena.envs.utils import word_lists

    download = nltk.download

    def download_once(name: str, *rest: Any, **options: Any) -> Any:
        for folder in ("corpora", "taggers"):
            with contextlib.suppress(LookupError):
                return bool(nltk.data.find(f"{folder}/{name}"))
        return download(name, *rest, **options)

    nltk.download = download_once
    word_lists.EnglishDictionary = functools.cache(word_lists.EnglishDictionary)


def seats(name: str, kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seats of an environment, each as it is `given`, and where nothing is: a chat in this process.

    verifiers' own defaults are a program with a shell, in a sandbox that is rented.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id

    is_plain = default_harness_id(name) == "bash"  # verifiers' word for: the task set brings none
    found = {}
    for seat, field in kind.model_fields.items():
        if not isinstance(field.default, AgentConfig):
            continue
        seat_given = given.get(seat, {})
        if not isinstance(seat_given, dict):
            raise WrongArgument(f"the parameter '{seat}' is {seat_given!r}; it is an object with fields of a seat")
        filled = found[seat] = dict(seat_given)
        if "runtime" not in field.default.model_fields_set:
            filled.setdefault("runtime", {"type": "subprocess"})
        if field.default.harness is None and is_plain:
            filled["harness"] = {"id": LOOP, **(filled.get("harness") or {})}
        if isinstance(filled.get("client"), dict):
            filled["client"] = {"type": "eval"} | filled["client"]
    return found


async def check_seats(name: str, env: Any, context: Any) -> None:
    """Refuse an environment in which the policy is not exactly one of the seats, so that nothing else is trained."""
    from verifiers.v1.configs.agent import agent_config_fields

    agents = env._episode_agents(context, [], None, None)
    await env.setup(agents)  # which says what seats the policy cannot have
    free = [seat for seat, spec in agent_config_fields(env.config).items() if spec.client is None]
    fixed = [seat for seat in free if not agents._agents[seat].trainable]
    advice = (
        'give it a model of its own: {"SEAT": {"model": "...", "client": {"base_url": "...", "api_key_var": "..."}}}'
    )
    if fixed:
        raise WrongArgument(f"the seat '{fixed[0]}' of '{name}' is not the policy's; {advice}")
    if len(free) != 1:
        raise WrongArgument(
            f"{len(free)} seats of '{name}' would be the policy: {', '.join(free)}; leave one, {advice}"
        )


def by_session(server: Any, policy: Any) -> Any:
    """Return `server` with another way of asking the policy: at the address and with the key of the episode."""
    from verifiers.v1.interception import Interception

    class BySession(Interception):  # type: ignore[misc]
        async def start(self) -> None:
            """Start nothing: the server runs."""

        @contextlib.asynccontextmanager
        async def acquire(self, session: Any) -> AsyncIterator[Any]:
            async with server.acquire(session) as slot:
                if session.ctx.client == policy:  # one client for all, so that connections are shared
                    session.client = copy.copy(session.client)
                    session.client.base_url, session.client.api_key = SESSION.get()
                yield slot

    return BySession()


def task_of(row: Mapping[str, Any], task_class: Any, config: Any) -> Any:
    """Return the task that the row's column `task` holds: its data as JSON, as `--tasks` prints them."""
    from pydantic import ValidationError

    data = row.get("task")
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(data) if isinstance(data, str) else data
    if not isinstance(data, dict):
        raise EpisodeLost("the row has no column 'task' with a task's data; --tasks prints rows that have one")
    try:
        return task_class(task_class.data_type().model_validate(data), config)
    except ValidationError as error:
        raise EpisodeLost(f"the column 'task' is of another environment: {problems(error, [])}") from None


def verdict(episode: Any, policy: Any) -> tuple[float | None, dict[str, float]]:
    """Return the reward of the policy's conversation, None where nothing rewards, and its metrics."""
    failed = [*episode.errors, *(trace.last_error for trace in episode.traces if not trace.ok and trace.last_error)]
    if not episode.ok:
        raise EpisodeLost(f"{failed[-1].type}: {failed[-1].message}" if failed else "the episode failed without a word")
    own = [trace for trace in episode.traces if trace.agent.config.client == policy]
    if len(own) != 1:
        raise EpisodeLost(f"the environment held {len(own)} conversations with the policy; one can be trained")
    parts = {name: part.score for name, part in own[0].rewards.items() if part is not None}
    reward = own[0].reward if parts else None
    if reward is not None and not math.isfinite(reward):
        raise EpisodeLost(f"the reward is {reward}")
    metrics = parts | {name: value for name, value in own[0].metrics.items() if value is not None}
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return reward, dict(list(finite.items())[:MAX_METRICS])


def rows(name: str, parameters: dict[str, Any], num_tasks: int) -> Iterator[dict[str, Any]]:
    """Yield rows of a data set for the first tasks: the conversation's opening, and the task's data as a text.

    A text, because readers of data sets make the fields of all rows alike. Where the environment speaks first, or the
    opening is no message of a user, the task's name stands for one.
    """
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.utils.loaders import load_taskset

    config = configured(name, parameters)
    with named_problems(name):
        for task in load_taskset(config.taskset).take(num_tasks):
            data = task.data
            opening = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
            if isinstance(data.prompt, str):
                opening.append({"role": "user", "content": data.prompt})
            else:
                opening += [message_to_wire(message) for message in data.prompt or []]
            if not any(message["role"] == "user" for message in opening):
                opening.append({"role": "user", "content": data.name or f"task {data.idx}"})
            dumped = data.model_dump(mode="json", exclude_defaults=True)
            yield {"prompt": opening, "task": json.dumps(dumped), "index": data.idx}


# ------------------------------------------------------------------------------------------------- the policy's turns


def register_loop() -> None:
    """Give verifiers a harness that holds the conversation in this process: no program is installed, none is started.

    What verifiers calls a harness may do so, as long as it asks the model through verifiers' own server.
    """
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harness import Harness
    from verifiers.v1.runtimes import ProgramResult

    class PolicyLoopConfig(HarnessConfig):  # type: ignore[misc]
        """No fields of its own."""

    class PolicyLoop(Harness[PolicyLoopConfig]):  # type: ignore[misc]
        """A chat with the tools of the task, until a turn calls none."""

        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = SUPPORTS_TOOL_INTERCEPTION = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, *given: Any, tool_interception_url: str | None = None) -> Any:
            context, _trace, _runtime, endpoint, secret, mcp_urls, data = given
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or []]
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            await PolicyChat(endpoint, secret, context.model, tool_interception_url).hold(messages, servers)
            return ProgramResult(exit_code=0, stdout="", stderr="")

    module = ModuleType(LOOP)
    module.__dict__.update(PolicyLoop=PolicyLoop, __all__=["PolicyLoop"])
    sys.modules[LOOP] = module


class PolicyChat:
    """One conversation with the policy; `endpoint` is verifiers' server, which asks the policy."""

    def __init__(self, endpoint: str, secret: str, model: str, gate: str | None) -> None:
        self._url, self._model, self._gate = f"{endpoint}/chat/completions", model, gate
        self._headers = {"Authorization": f"Bearer {secret}"}

    async def hold(self, messages: list[dict[str, Any]], servers: dict[str, Any]) -> None:
        """Take turns until one calls no tool, or until there is no room for another one."""
        import httpx
        from verifiers.v1.harnesses.utils.mcp import connect_mcp

        # No limit for a turn: it may wait for the policy as long as the episode lives. The server is on this machine.
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None, verify=False))
            tools: list[Any] = []
            connected: tuple[Any, Any] = ({}, {})
            if servers:
                async with asyncio.timeout(CONNECT_LIMIT_S):
                    tools, *connected = await connect_mcp({"mcpServers": servers}, stack)
            while (message := await self._turn(http, messages, tools)) is not None:
                messages.append(message)
                if not message.get("tool_calls"):
                    return
                for call in message["tool_calls"]:
                    content = await self._result(http, call, *connected)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    async def _turn(self, http: Any, messages: list[Any], tools: list[Any]) -> dict[str, Any] | None:
        """Return the policy's message; None where a limit leaves no room for one.

        What there is is scored then, without what tools have answered behind the last message.
        """
        from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS

        body = {"model": self._model, "messages": messages} | ({"tools": tools} if tools else {})
        response = await http.post(self._url, headers=self._headers, json=body)
        if response.status_code == 200:
            message = response.json()["choices"][0]["message"]
            return {key: value for key, value in message.items() if value is not None}
        text = response.text.casefold()
        if response.status_code in (400, 413) and any(end in text for end in (*CONTEXT_OVERFLOW_MARKERS, *ENDS)):
            return None
        raise RuntimeError(f"the policy's turn was refused with status {response.status_code}: {response.text[:300]}")

    async def _result(self, http: Any, call: Mapping[str, Any], dispatch: Any, servers: Any) -> Any:
        """Run a tool call, if the task's own rules let it run; what is wrong with the call is its result."""
        from verifiers.v1.harnesses.utils.compaction import truncate_tool_output
        from verifiers.v1.harnesses.utils.mcp import call_mcp

        name, text = call["function"]["name"], call["function"]["arguments"] or "{}"
        arguments: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(text)
        if self._gate is not None:
            ask = {"tool_call_id": call["id"], "name": name, "arguments": arguments if arguments is not None else text}
            allowed = (await http.post(self._gate, headers=self._headers, json=ask)).raise_for_status().json()
            if allowed["action"] == "stop":
                raise RuntimeError(allowed["reason"])
            if allowed["action"] == "deny":
                return allowed["message"]["content"]
        if not isinstance(arguments, dict):
            return "error: the arguments are no JSON object"
        if name not in dispatch:
            return f"error: there is no tool {name!r}"
        content = await call_mcp(servers, dispatch, name, arguments)
        return truncate_tool_output(content) if isinstance(content, str) else content


# ------------------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def named_problems(name: str) -> Iterator[None]:
    """Turn what goes wrong while the environment `name` is loaded into a sentence."""
    try:
        yield
    except WrongArgument:
        raise
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        module = module_of(name)
        if cause.name in (module, f"verifiers.v1.tasksets.{module}"):
            known = names()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            listed = f"installed here are {', '.join(known)}; others are installed by pip into .venv-verifiers"
            raise WrongArgument(f"there is no environment '{name}'; {hint}{listed}") from None
        told = error if f"import {cause.name!r}" in str(error) else cause  # verifiers blames the name for all
        raise WrongArgument(f"the environment '{name}' cannot be imported: {in_one_line(told)}") from None
    except Exception as error:  # noqa: BLE001 - whatever foreign code raises
        old = sys.modules.get(module_of(name))
        if old is not None and hasattr(old, "load_environment"):
            raise WrongArgument(
                f"'{name}' is written for verifiers before 0.4: it has `load_environment`, and no task set"
            ) from None
        hint = (
            f"; {INSTALL} and with the word lists that TextArena's games need"
            if isinstance(error, LookupError) and "nltk" in str(error)
            else ""
        )
        raise WrongArgument(f"the environment '{name}' cannot be loaded: {in_one_line(error)}{hint}") from None


def module_of(name: str) -> str:
    """Return the module that verifiers imports for a name such as `owner/gsm8k-v1@1.2`."""
    return name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


def names() -> list[str]:
    """Return the names of the task sets in verifiers, and of the installed packages that depend on it."""
    spec = importlib.util.find_spec("verifiers.v1.tasksets")
    places = spec.submodule_search_locations if spec is not None else None
    bundled = {module.name.replace("_", "-") for module in pkgutil.iter_modules(places)}
    asking = (d.name for d in importlib.metadata.distributions() if any(map(asks_for_verifiers, d.requires or [])))
    return sorted(bundled | set(asking))


def asks_for_verifiers(requirement: str) -> bool:
    return re.match(r"verifiers(?![\w.-])", requirement) is not None


def problems(error: Any, known: list[str]) -> str:
    """Return up to three of pydantic's findings in one line, with the nearest name for one that is unknown."""
    found = []
    for finding in error.errors()[:3]:
        path = [str(part) for part in finding["loc"]]
        near = difflib.get_close_matches(path[-1], known, n=1) if finding["type"] == "extra_forbidden" and path else []
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        found.append(f"{'.'.join(path).removeprefix('taskset.')}: {finding['msg']}{hint}")
    return in_one_line(EpisodeLost("; ".join(found) + (f"; fields are {', '.join(known)}" if known else "")))


if __name__ == "__main__":
    sys.exit(main())
