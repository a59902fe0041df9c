"""Chat templates in the forms of published models, and small tokenizers of their kinds, trained here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slipstream.models.tokenizer import char_tokenizer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_QWEN_TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nReturn a json object within <tool_call></tool_call> XML tags.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_QWEN_TOOL_MESSAGE = """
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
"""
_QWEN_CALLS = """
            {%- for tool_call in message.tool_calls %}
                {{- '\\n<tool_call>\\n' + (tool_call.function | tojson) + '\\n</tool_call>' }}
            {%- endfor %}
"""
QWEN25 = (
    _QWEN_TOOLS
    + """{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- if message.tool_calls %}"""
    + _QWEN_CALLS
    + """        {%- endif %}
        {{- '<|im_end|>\\n' }}"""
    + _QWEN_TOOL_MESSAGE
    + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN3 = (
    _QWEN_TOOLS
    + """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')
            and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}"""
    + _QWEN_CALLS
    + """        {%- endif %}
        {{- '<|im_end|>\\n' }}"""
    + _QWEN_TOOL_MESSAGE
    + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA31 = """{{- bos_token }}
{%- if tools is not none %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nFunctions:\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are supported") }}
    {%- endif %}
{%- endfor %}
"""
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}"
    "{{ '\n' }}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
HARMONY = """{%- set ns = namespace(called='') %}{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start|>assistant<|message|>' + message.content }}
        {%- if message.tool_calls %}
            {%- set ns.called = message.tool_calls[-1].function.name %}
            {{- '<|call|>' + ns.called + (message.tool_calls[-1].function.arguments | tojson) }}
        {%- endif %}
        {{- '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if not ns.called %}{{- raise_exception('Message has tool role, but nothing was called!') }}{%- endif %}
        {{- '<|start|>functions.' + ns.called + ' to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant<|message|>' }}{%- endif %}"""
CHARACTERS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEEPSEEK = (  # R1: the header of the assistant's turn opens a thought, which earlier turns have lost
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% else %}"
    "{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


@dataclass(frozen=True)
class Family:
    """A template with the tokens of its tokenizer; `roles` are those that its observations may have."""

    template: str
    special: tuple[str, ...]
    end: str | None
    roles: tuple[str, ...] = ("user",)
    tools: bool = False
    plain: tuple[str, ...] = ()  # added tokens that are not special
    bos: str | None = None
    lead: str = ""  # what the template writes between its header and an assistant's text
    kind: str = "bytes"
    rstrip: bool = False


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
_HARMONY = ("<|start|>", "<|message|>", "<|end|>", "<|call|>")
FAMILIES = {
    "smollm2": Family(SMOLLM2, _IM, "<|im_end|>"),
    "smollm2 with roles": Family(SMOLLM2, _IM, "<|im_end|>", roles=("user", "tool", "system")),
    "qwen2.5": Family(QWEN25, _IM, "<|im_end|>", roles=("user", "tool"), tools=True, plain=_QWEN[:4]),
    "qwen3 with tools": Family(QWEN3, _IM, "<|im_end|>", roles=("tool",), tools=True, plain=_QWEN),
    "llama3": Family(LLAMA3, _LLAMA, "<|eot_id|>", bos="<|begin_of_text|>"),
    "llama3.1": Family(LLAMA31, _LLAMA, "<|eot_id|>", roles=("user", "tool"), tools=True, bos="<|begin_of_text|>"),
    "mistral": Family(MISTRAL, _MISTRAL, "</s>", bos="<s>", lead=" "),
    "mistral with tools": Family(MISTRAL, _MISTRAL, "</s>", roles=("tool",), tools=True, bos="<s>", lead=" "),
    "mistral in pieces": Family(MISTRAL, _MISTRAL, "</s>", bos="<s>", lead=" ", kind="pieces"),
    "gemma2": Family(GEMMA2, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", bos="<bos>"),
    "zephyr": Family(ZEPHYR, ("<s>", "</s>"), "</s>"),
    "phi3": Family(PHI3, ("<s>", "<|end|>", "<|user|>", "<|assistant|>"), "<|end|>", rstrip=True),
    "characters": Family(CHARACTERS, (), None, kind="characters"),
}
HARMONY_FAMILY = Family(HARMONY, _HARMONY, "<|end|>", roles=("tool",), tools=True)
QWEN3_FAMILY = FAMILIES["qwen3 with tools"]

_TEXT = (
    "system user assistant tool ipython\n\nYou are a helpful AI assistant.\n\n\n\nThe answer is 12, and the rest.\n"
    'First, look it up: {"result": null, "text": "a word"}\n  The quick brown fox isn\'t lazy.'
    " def f(x):\n    return x\n"
)
_LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bytes() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([_TEXT] * 2, trainer)
    return made


def _pieces(*, strips: bool) -> Tokenizer:
    """As sentencepiece's are converted: spaces are characters of their own kind, bytes stand in for unknown ones.

    Most decoders strip the first space of a text.
    """
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = sorted({*map(chr, range(33, 127)), "\u2581"})
    merged = ["\u2581t", "he", "\u2581the", "an", "er", "\u2581a", "in"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", *bytes_, *characters, *merged])}
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("a", "n"), ("e", "r"), ("\u2581", "a"), ("i", "n")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    last = [decoders.Strip(content=" ", left=1, right=0)] if strips else []
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    return made


@cache
def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    if family.kind == "characters":
        made = char_tokenizer()
    else:
        backend = _pieces(strips="stripped" in family.kind) if "pieces" in family.kind else _bytes()
        backend.add_special_tokens(
            [AddedToken(one, special=True, normalized=False, rstrip=family.rstrip) for one in family.special]
        )
        backend.add_tokens([AddedToken(one, special=False, normalized=False) for one in family.plain])
        made = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token=family.bos, eos_token=family.end, clean_up_tokenization_spaces=False
        )
    made.chat_template = family.template
    return made
