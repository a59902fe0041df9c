"""A foreign checkpoint's tokenizer and chat template, run in a process that can be killed.

Both are programs. A template loops and recurses, a tokenizer's regular expressions backtrack and its replacements
double a text with each step; the libraries that run them have no limits of their own, and some end the process. So a
child tries them first, or runs them, with limits on processor time, memory and what it answers:

    rehearse_tokenizer   load the tokenizer of a folder, encode and decode texts with it, before it is loaded here
    ChatRenderer         chats to texts, by transformers' own `apply_chat_template`

The child ends with its socket; while it works, a timer of its own ends it. It writes no files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError, clip, did_you_mean
from slipstream.core.files import read_whole
from slipstream.core.processes import module_folders

CPU_S = 10.0  # of processor time for one request
WALL_S = 55.0  # until an answer must be there, on a machine that is busy with other things
MEMORY_BYTES = 2 * 1024**3  # beyond what its libraries take
MAX_ANSWER_BYTES = 256 * 1024**2
MAX_CHARACTERS = 16 * 1024**2  # of the texts of one request; JSON takes at most 12 bytes for one
MAX_FILE_BYTES = 256 * 1024**2  # the largest tokenizers have some 40 MB
CHATS_AT_ONCE = 64
CHARACTERS_AT_ONCE = 4 * 1024**2
READ_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".py")  # of what a tokenizer is loaded from
HINT = "is the file damaged, or from somebody you do not trust?"

_ENGLISH = "The quick brown fox, aged 12, jumps over 3.5 lazy dogs; don't you think so? It costs $1,234.56 (or less).\n"
PROBES = (
    _ENGLISH * 20,
    "a" * 2000,
    " " * 2000,
    "\n\t\r" * 500,
    "0123456789" * 200,
    "".join(map(chr, range(1, 0x250))),
    "\u6f22\u5b57\u4eee\u540d \u0627\u0644\u0639\u0631\u0628 \U0001f600\u200d\U0001f680 e\u0301 \ufffd" * 50,
    "def f(x):\n    return [i ** 2 for i in range(x) if i % 2 == 0]  # <|end|> </s> [INST]\n" * 20,
)
"""Texts that a tokenizer is tried with: what prompts are made of, and what backtracking feeds on."""


class _Stopped(Exception):
    """The child gave no answer, for this reason."""


# The trusted end


class _Child:
    """A process that answers requests of one kind, one after the other."""

    def __init__(self, kind: str) -> None:
        mine, others = socket.socketpair()
        with others:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.models.foreign_text", kind, str(others.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[others.fileno()],
                env=_environment(),
            )
        self._socket = mine
        self.close = weakref.finalize(self, _end, self._process, mine)

    def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to `request`. Raises _Stopped, the child being dead then, where there is none."""
        deadline = time.monotonic() + WALL_S
        try:
            self._socket.settimeout(WALL_S)
            _send(self._socket, json.dumps(request, default=str).encode())
            answer = json.loads(_receive(self._socket, MAX_ANSWER_BYTES, deadline) or b"null")
        except TimeoutError:
            self.close()
            raise _Stopped(f"it has not ended after {WALL_S:g} s") from None
        except (OSError, ValueError, RecursionError):
            answer = None
        if answer is None:
            raise _Stopped(self._reason())
        return answer

    def _reason(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        if code == -signal.SIGPROF:
            return f"it takes more than {CPU_S:g} s of processor time"
        return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else "its process ended"


def _environment() -> dict[str, str]:
    """Return the environment of the child: no secrets, no network of Hugging Face's, where packages are."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    fixed = {"LANG": "C.UTF-8", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return kept | module_folders() | fixed


def _end(process: subprocess.Popen[bytes], mine: socket.socket) -> None:
    mine.close()
    process.kill()
    process.wait()


def check_files(path: Path) -> str:
    """A digest of the files in folder `path` that a tokenizer is loaded from.

    ConfigError for one that is no regular file, or is larger than any tokenizer.
    """
    digest = hashlib.sha256()
    for file in sorted([*path.iterdir(), *path.glob("additional_chat_templates/*")]):
        if file.suffix in READ_SUFFIXES and not file.name.endswith(".safetensors.index.json"):
            try:
                content = read_whole(file, MAX_FILE_BYTES)
            except OSError as error:
                raise ConfigError(f"'{file}' cannot be read", got=error.strerror, hint=HINT) from error
            if file.suffix != ".jinja":  # a template does nothing before it is rendered
                digest.update(f"{file.relative_to(path)} {len(content)} ".encode())
                digest.update(content)
    return digest.hexdigest()


def rehearse_tokenizer(path: Path) -> None:
    """Raise ConfigError unless the tokenizer in folder `path` loads, encodes and decodes within the limits.

    In a process of its own, which is gone when this returns. Files that passed once are not tried again.
    """
    digest = check_files(path)
    if digest in _PASSED:
        return
    child = _Child("rehearse")
    try:
        error = child.ask({"path": str(path.absolute())})["error"]
    except _Stopped as stopped:
        error = str(stopped)
    finally:
        child.close()
    if error is not None:
        raise ConfigError(
            f"the tokenizer in '{path}' cannot be loaded and used",
            got=clip(error),
            allowed=f"one that loads, and encodes texts, within {CPU_S:g} s and {MEMORY_BYTES // 1024**3} GiB",
            hint=f"{HINT} `transformers.AutoTokenizer.from_pretrained` on that folder says more",
        )
    _PASSED.add(digest)


_PASSED: set[str] = set()
"""Digests of the files of tokenizers that were tried in this process."""


GIVEN = {
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding", "truncation"),
    *("max_length", "tokenizer_kwargs", "add_generation_prompt", "continue_final_message", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "raise_exception", "strftime_now"),
    *(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")),
}
"""Arguments of `apply_chat_template`, and what every template is given."""


def check_variables(template: object, variables: Mapping[str, Any]) -> None:
    """Raise ConfigError for `variables` that no word of `template` is about: they would change nothing, unseen."""
    known = set(re.findall(r"[A-Za-z_]\w*", str(template or ""))) - GIVEN
    if unknown := [name for name in variables if name not in known]:
        raise ConfigError(
            "the chat template has no such variable" if template else "there is no chat template that has variables",
            got=f"chat_template_kwargs: {clip(', '.join(unknown), 100)}",
            allowed="words of the template, but those that every template is given",
            hint=did_you_mean(unknown[0], known),
        )


class ChatRenderer:
    """Chats to texts by the chat template of a tokenizer, just as transformers' `apply_chat_template` renders them.

    The process that does it begins with the first chat and ends with this object, or where the template exhausts it. A
    template that refuses a chat leaves it as it is. `variables` are further ones that the template knows, such as
    enable_thinking.
    """

    def __init__(
        self,
        template: object,
        special_tokens: Mapping[str, Any],
        *,
        origin: str,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        check_variables(template, variables or {})
        self._tokenizer = {
            "template": template,
            "special_tokens": dict(special_tokens),
            "variables": dict(variables or {}),
        }
        self._origin = origin
        self._child: _Child | None = None

    def render(
        self,
        chats: Sequence[list[dict[str, Any]]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[str]:
        """One text per chat, to be continued by the assistant. ConfigError where the template fails or has no end.

        `tools` are the schemas of the functions that the assistant may call. Without `add_generation_prompt` the text
        ends with the last message.
        """
        request = {
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        texts: list[str] = []
        batch: list[list[dict[str, Any]]] = []
        size = 0
        for chat in chats:
            batch.append(chat)
            size += len(str(chat))
            if len(batch) == CHATS_AT_ONCE or size >= CHARACTERS_AT_ONCE:
                texts += self._render(batch, request)
                batch, size = [], 0
        return texts + (self._render(batch, request) if batch else [])

    def _render(self, chats: Sequence[list[dict[str, Any]]], request: dict[str, Any]) -> list[str]:
        self._child = self._child or _Child("render")
        try:
            answer = self._child.ask(self._tokenizer | request | {"chats": list(chats)})
        except _Stopped as stopped:
            self._child = None
            raise ConfigError(
                f"the chat template of the tokenizer in '{self._origin}' was stopped",
                got=str(stopped),
                allowed=f"{len(chats)} chats within {CPU_S:g} s, {MEMORY_BYTES // 1024**3} GiB of memory and "
                f"{MAX_CHARACTERS:,} characters of text",
                hint=HINT,
            ) from None
        if answer["error"] is None:
            return list(map(str, answer["texts"]))
        if answer.get("is_exhausted", True):
            self._child.close()
            self._child = None
        failed = chats[min(int(answer["index"]), len(chats) - 1)]
        raise ConfigError(
            f"the chat template of the tokenizer in '{self._origin}' does not take these messages",
            got=clip(answer["error"], 300),
            allowed=f"a template for {clip(', '.join(str(message['role']) for message in failed))}",
            hint="some know no system message: drop prompts.system; others need users and assistants in turn",
        )


# Both ends


def _send(peer: socket.socket, content: bytes) -> None:
    peer.sendall(len(content).to_bytes(8, "little") + content)


def _receive(peer: socket.socket, max_bytes: int, deadline: float | None = None) -> bytes | None:
    """The next frame; None where the other side has ended. ValueError for a longer one, TimeoutError at `deadline`."""
    content, wanted = bytearray(), 8
    length: int | None = None
    while len(content) < wanted:
        if deadline is not None:
            peer.settimeout(max(deadline - time.monotonic(), 1e-3))
        block = peer.recv(min(wanted - len(content), 1 << 20))
        if not block:
            return None
        content += block
        if length is None and len(content) == 8:
            length = int.from_bytes(content, "little")
            if length > max_bytes:
                raise ValueError(f"{length} bytes")
            content, wanted = bytearray(), length
    return bytes(content)


# The child


def _rehearsed(request: dict[str, Any]) -> dict[str, Any]:
    from slipstream.models.tokenizer import read_tokenizer

    tokenizer = read_tokenizer(Path(request["path"]))
    ids = [tokenizer(text)["input_ids"] for text in PROBES]
    for one in ids:
        tokenizer.decode(one)
    known = sorted(tokenizer.get_vocab().values())
    for start in range(0, len(known), 1000):
        tokenizer.decode(known[start : start + 1000])
    return {"error": None}


def _rendered(request: dict[str, Any]) -> dict[str, Any]:
    from jinja2 import TemplateSyntaxError
    from transformers import PreTrainedTokenizerBase

    class TemplateOwner:  # what `apply_chat_template` uses of one
        chat_template = request["template"]
        special_tokens_map = request["special_tokens"]
        get_chat_template = PreTrainedTokenizerBase.get_chat_template
        apply_chat_template = PreTrainedTokenizerBase.apply_chat_template

    texts: list[str] = []
    tokenizer: Any = TemplateOwner()
    room = MAX_CHARACTERS
    for index, chat in enumerate(request["chats"]):
        try:
            text = tokenizer.apply_chat_template(
                chat,
                tools=request["tools"],
                tokenize=False,
                add_generation_prompt=request["add_generation_prompt"],
                **request["variables"],
            )
        except Exception as error:  # noqa: BLE001 - a template may raise anything; it is told
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            return {"error": f"{_told(error)}{line}", "index": index, "is_exhausted": isinstance(error, MemoryError)}
        room -= len(text)
        if room < 0:
            return {"error": f"a text of {len(text)} characters", "index": index}
        texts.append(text)
    return {"error": None, "texts": texts}


def _told(error: BaseException) -> str:
    from jinja2 import TemplateError

    if isinstance(error, MemoryError):
        return f"it takes more than {MEMORY_BYTES // 1024**3} GiB of memory"
    return clip(error, 300) if isinstance(error, TemplateError) else clip(f"{type(error).__name__}: {error}", 300)


ANSWERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"rehearse": _rehearsed, "render": _rendered}


def _confine() -> None:
    """Bound what this process may take. Its libraries are imported already."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere the limit on processor time is all there is
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def _main(kind: str, descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP):  # a run goes on with its step; this process ends with its socket
        signal.signal(number, signal.SIG_IGN)
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then does without: two seconds less
    import transformers.models.auto.tokenization_auto  # noqa: F401 - before memory is bounded

    _confine()
    peer = socket.socket(fileno=descriptor)
    while (request := _receive(peer, 1 << 40)) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            answer = ANSWERS[kind](json.loads(request))
            content = json.dumps(answer).encode()
        except BaseException as error:  # noqa: BLE001 - told; a panic of a Rust library is no Exception
            content = json.dumps({"error": _told(error), "index": 0}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(peer, content)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
