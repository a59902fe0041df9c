"""Prompts: disjoint splits, the ordinal as the only state, templates, datasets, demonstrations."""

from __future__ import annotations

import copy
import json
import random
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from covering import with_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import merge, resolve
from slipstream.core.sections import PromptsConfig, TaskConfig
from slipstream.core.stage_sections import DemonstrationConfig, WarmStartConfig
from slipstream.core.types import Prompt
from slipstream.models.tokenizer import CharTokenizer
from slipstream.prompts import (
    PromptStream,
    build_prompts,
    count_overlap,
    dataset,
    demonstrations,
    held_out_prompts,
    task_table,
)
from slipstream.prompts.build import check_demonstrations
from slipstream.prompts.dataset import between_periods
from slipstream.prompts.rows import normalise_text, to_json_types
from slipstream.prompts.template import Encoder, Template
from slipstream.stages.chain import check_data
from slipstream.stages.completions import reference_completions
from slipstream.stages.rl import FromPython

_CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate(characters)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    made.chat_template = _CHAT
    return made


def run_config(seed: int = 0, **prompts: object) -> RunConfig:
    config = PromptsConfig.model_validate(prompts)
    sections = {"eval": {"num_prompts": min(500, config.num_eval)}, "model": {"max_positions": 2048}}
    return RunConfig.model_validate({"seed": seed, "prompts": config, **sections})


def spelling(**params: object) -> list[TaskConfig]:
    return [TaskConfig(name="spell_backward", params=params)]


def test_task_prompts_are_complete_disjoint_and_repeatable(tokenizer: PreTrainedTokenizerFast) -> None:
    config = run_config(
        tasks=spelling(min_word_len=3, max_word_len=5), template="{word}>", num_train=1000, num_eval=200
    )
    one = build_prompts(config, tokenizer)
    random.seed(1)
    two = build_prompts(config, tokenizer)
    assert len(one.train) == 1000
    assert len(one.eval) == 200
    assert one.report.overlap == 0
    words = {p.text.casefold() for p in one.train.prompts}
    assert len(words) == 1000
    assert not words & {p.text.casefold() for p in one.eval}
    assert [p.prompt_id for p in one.eval] == [p.prompt_id for p in two.eval]
    assert [p.text for p in one.train.prompts] == [p.text for p in two.train.prompts]
    prompt = one.eval[0]
    assert prompt.text == prompt.columns["word"] + ">"
    assert prompt.answer == prompt.columns["word"][::-1]
    assert prompt.tokens.dtype == np.int32
    assert tokenizer.decode(prompt.tokens).replace(" ", "") == prompt.text
    assert json.loads(json.dumps(prompt.columns)) == prompt.columns
    assert prompt.columns["entry"]["metadata"]["word"] == prompt.columns["word"]


def test_neighbouring_seeds_hold_out_different_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    """Item i of seed s is item i-1 of seed s+1 in reasoning-gym; the run's seed must not inherit that."""
    texts = []
    for seed in (5, 6):
        config = run_config(seed, tasks=spelling(), num_train=200, num_eval=50)
        texts.append([p.text for p in build_prompts(config, tokenizer).train.prompts])
    assert len(set(texts[0]) & set(texts[1])) < 20


def test_generation_gives_the_global_random_state_back(tokenizer: PreTrainedTokenizerFast) -> None:
    random.seed(3)
    np.random.seed(3)
    expected = random.Random(3).random(), np.random.RandomState(3).rand()
    tasks = [TaskConfig(name="pool_matrix", params={"min_rows": 2, "min_cols": 2, "max_rows": 4, "max_cols": 4})]
    build_prompts(run_config(tasks=tasks, num_train=5, num_eval=2, max_prompt_tokens=1000), tokenizer)
    assert (random.random(), np.random.rand()) == expected


def test_a_task_that_runs_dry_says_how_much_it_has(tokenizer: PreTrainedTokenizerFast) -> None:
    tasks = [TaskConfig(name="chain_sum", params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})]
    with pytest.raises(ConfigError, match=r"(?s)chain_sum.*cannot supply.*about \d+"):
        build_prompts(run_config(tasks=tasks, num_train=300, num_eval=100), tokenizer)


def test_task_errors(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="did you mean 'spell_backward'"):
        build_prompts(run_config(tasks=[TaskConfig(name="spell_backwards")], num_train=5, num_eval=1), tokenizer)
    with pytest.raises(ConfigError, match="does not accept its parameters"):
        build_prompts(run_config(tasks=spelling(word_length=3), num_train=5, num_eval=1), tokenizer)
    with pytest.raises(ConfigError, match="cannot be a parameter"):
        build_prompts(run_config(tasks=spelling(seed=3), num_train=5, num_eval=1), tokenizer)
    mixed = TaskConfig(name="composite", params={"datasets": [{"name": "countdown", "weight": 1.0}]})
    with pytest.raises(ConfigError, match=r"as an entry of prompts\.tasks"):
        build_prompts(run_config(tasks=[mixed], num_train=5, num_eval=1), tokenizer)


def test_tasks_mix_by_weight_and_keep_their_keys(tokenizer: PreTrainedTokenizerFast) -> None:
    tasks = [TaskConfig(name="spell_backward", weight=3), TaskConfig(name="chain_sum", weight=1)]
    made = build_prompts(run_config(tasks=tasks, num_train=400, num_eval=40), tokenizer)
    assert made.report.tasks == {"spell_backward": 300, "chain_sum": 100}
    assert sum(p.task == "chain_sum" for p in made.eval) == 10
    assert list(task_table([tasks[0], tasks[0]])) == ["spell_backward", "spell_backward#2"]


@pytest.mark.parametrize(("num_train", "num_eval"), with_slow([(60, 10)], [(300, 50)]))
def test_too_long_prompts_are_dropped_and_counted(
    tokenizer: PreTrainedTokenizerFast, num_train: int, num_eval: int
) -> None:
    config = run_config(
        tasks=spelling(max_word_len=7), template="{word}", max_prompt_tokens=5, num_train=num_train, num_eval=num_eval
    )
    made = build_prompts(config, tokenizer)
    assert max(len(p.tokens) for p in [*made.train.prompts, *made.eval]) == 5
    assert made.report.num_too_long > 0
    assert len(made.train) == num_train


@given(st.text(max_size=40))
def test_normalisation_is_idempotent_and_ignores_case_and_spacing(text: str) -> None:
    once = normalise_text(text)
    assert normalise_text(once) == once
    assert normalise_text(f"  {text}\t\n") == once


def test_normalisation_folds_what_looks_alike() -> None:
    assert normalise_text("Ｗhat  IS\u00a0½?") == normalise_text("what is 1⁄2?")


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text("aAbB ", min_size=1, max_size=6), min_size=12, max_size=60),
    seed=st.integers(0, 2**32),
    num_eval=st.integers(1, 3),
)
def test_dataset_splits_are_disjoint_whatever_the_data(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    seed: int,
    num_eval: int,
) -> None:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    distinct = {" ".join(t.lower().split()) for t in texts}
    config = run_config(seed, dataset=str(path), num_eval=num_eval, num_train=100)
    if len(distinct) <= num_eval:
        with pytest.raises(ConfigError, match="held-out"):
            build_prompts(config, tokenizer)
        return
    made = build_prompts(config, tokenizer)
    keys = [" ".join(p.text.lower().split()) for p in [*made.train.prompts, *made.eval]]
    assert sorted(keys) == sorted(distinct)
    assert len(made.eval) == num_eval
    assert made.report.overlap == 0


def test_a_prompt_stays_held_out_when_the_data_are_reordered(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(50)]
    held_out = []
    for name, order in (("a", rows), ("b", rows[::-1])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in order))
        made = build_prompts(run_config(dataset=str(path), num_eval=10), tokenizer)
        held_out.append({p.text for p in made.eval})
    assert held_out[0] == held_out[1]


def test_overlap_is_computed_from_the_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    def prompt(text: str) -> Prompt:
        return Prompt(prompt_id=text, text=text, tokens=np.zeros(1, np.int32), task="t")

    assert count_overlap([prompt("One  two"), prompt("x")], [prompt("one TWO"), prompt("y")]) == 1


def test_eval_dataset_texts_leave_the_training_data(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    train.write_text("".join(json.dumps({"prompt": f"Q{i}"}) + "\n" for i in range(10)))
    held_out.write_text("".join(json.dumps({"prompt": f"q{i} "}) + "\n" for i in range(3)))
    made = build_prompts(run_config(dataset=str(train), eval_dataset=str(held_out), num_eval=3), tokenizer)
    assert [p.text for p in made.train.prompts] == [f"Q{i}" for i in range(3, 10)]
    assert made.report.overlap == 0
    assert made.report.num_held_out == 3
    with pytest.raises(ConfigError, match="no training prompts") as refused:
        build_prompts(run_config(dataset=str(held_out), eval_dataset=str(held_out), num_eval=3), tokenizer)
    assert "3 of them held out" in str(refused.value)
    assert "max_prompt_tokens" not in str(refused.value.hint)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_rows_are_kept_out_whatever_renders_them(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, chat: bool, streaming: bool
) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    train.write_text("".join(json.dumps({"prompt": f"Q{i}"}) + "\n" for i in range(10)))
    held_out.write_text("".join(json.dumps({"prompt": f"q{i} "}) + "\n" for i in range(3)))
    own = {"name": "own", "dataset": str(held_out), "num_prompts": 3}
    for data, tables in (({"eval_dataset": str(held_out), "num_eval": 3}, {}), ({}, {"eval": {"sets": [own]}})):
        config = run_config(dataset=str(train), chat=chat, streaming=streaming, **data)
        config = resolve(merge(config.model_dump(), tables))
        made = build_prompts(config, tokenizer)
        texts = {made.train.prompt(ordinal).columns["question"] for ordinal in range(14)}
        assert texts == {f"Q{i}" for i in range(3, 10)}
        assert made.report.overlap == 0


TEXT, CHAT, SYSTEM = "x", [{"role": "user", "content": "x"}], {"role": "system", "content": "s"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("prompts", "of_set", "train", "held_out", "is_trained_on"),
    [
        ({}, {"template": "Q: {question}"}, TEXT, TEXT, False),
        ({"template": "{prompt}?"}, {"template": "Q: {question}", "prompt_column": "problem"}, TEXT, TEXT, False),
        ({"template": "{note} {question}"}, {"template": "{question}"}, TEXT, TEXT, True),
        ({"chat": True}, {}, CHAT, TEXT, False),
        ({"chat": True}, {"template": "Q: {question}"}, CHAT, TEXT, False),
        ({"chat": True}, {}, TEXT, CHAT, False),
        ({"chat": True, "system": "s"}, {}, TEXT, [SYSTEM, *CHAT], False),
        ({"chat": True}, {}, [SYSTEM, *CHAT], TEXT, False),
        ({"chat": True}, {}, [SYSTEM, *CHAT], [SYSTEM | {"content": "other"}, *CHAT], True),
        ({"chat": True}, {}, CHAT, [*CHAT, {"role": "assistant", "content": "y"}, *CHAT], True),
        (
            {"template": "{question}abcdef", "max_prompt_tokens": 6, "too_long": "cut"},
            {"template": "{question}"},
            TEXT,
            TEXT,
            False,
        ),
    ],
)
def test_no_row_of_a_set_is_trained_on_in_other_words_or_as_a_chat(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    prompts: dict[str, object],
    of_set: dict[str, str],
    train: object,
    held_out: object,
    is_trained_on: bool,
    streaming: bool,
) -> None:
    def numbered(form: object, number: int) -> object:
        return json.loads(json.dumps(form).replace('"x"', f'"x{number}"'))

    rows = [{"prompt": numbered(train, i), "note": "n"} for i in range(8)]
    column = of_set.get("prompt_column", "prompt")
    own = [{column: numbered(held_out, i)} for i in range(3)]
    one = {"name": "own", "dataset": write_rows(tmp_path / "own.jsonl", own), "num_prompts": 3} | of_set
    data = {"dataset": write_rows(tmp_path / "train.jsonl", rows), "streaming": streaming}
    made = build_prompts(resolve({"prompts": data | prompts, "eval": {"sets": [one]}}), tokenizer)
    asked = {made.train.prompt(ordinal).columns["question"] for ordinal in range(16)}
    assert asked == {f"x{i}" for i in range(0 if is_trained_on else 3, 8)}
    assert made.report.overlap == 0
    assert made.report.num_eval == 3


def test_the_overlap_counts_what_a_template_makes_of_held_out_rows_and_each_of_them_once(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = run_config(dataset=write_rows(tmp_path / "a.jsonl", [{"prompt": f"x{i}"} for i in range(4)]), num_eval=1)
    trained = build_prompts(config, tokenizer).train.prompts
    other = run_config(dataset=config.prompts.dataset, num_eval=1, template="Q: {question}")
    asked = build_prompts(other, tokenizer)
    assert count_overlap(trained, asked.all) == 0
    assert count_overlap(trained, asked.all, Encoder(config.prompts, tokenizer)) == 3


def test_an_end_that_is_written_out_is_not_doubled(tokenizer: PreTrainedTokenizerFast) -> None:
    made = build_prompts(run_config(tasks=spelling(), num_train=3, num_eval=1), tokenizer)
    plain, ended = (
        demonstrations(
            WarmStartConfig(demonstrations=[DemonstrationConfig(template=text)]), made.train.prompts, tokenizer, seed=0
        )
        for text in ("{answer}", "{answer}<eos>")
    )
    assert [of_ended.tolist() for _, of_ended in ended] == [of_plain.tolist() for _, of_plain in plain]
    references = [
        [one.segments[0].tokens.tolist() for one in reference_completions(text, made.train.prompts, tokenizer)]
        for text in ("{answer}", "{answer}<eos>")
    ]
    assert references[0] == references[1] == [of_plain.tolist() for _, of_plain in plain]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**40), start=st.integers(0, 10**6))
def test_the_ordinal_is_all_the_state_of_a_stream(size: int, seed: int, start: int) -> None:
    prompts = [Prompt(prompt_id=str(i), text="", tokens=np.zeros(1, np.int32), task="t") for i in range(size)]
    walked = PromptStream(prompts, seed)
    ordinals = list(range(start, start + 3 * size))
    ids = [walked.prompt(o).prompt_id for o in ordinals]
    for o in reversed(ordinals):  # asked for in any order, by a stream that starts anywhere
        assert PromptStream(prompts, seed).prompt(o).prompt_id == ids[o - start]
    first_whole_epoch = -start % size
    epoch = ids[first_whole_epoch : first_whole_epoch + size]
    assert sorted(epoch, key=int) == [str(i) for i in range(size)]


def test_epochs_and_seeds_shuffle_differently() -> None:
    prompts = [Prompt(prompt_id=str(i), text="", tokens=np.zeros(1, np.int32), task="t") for i in range(50)]
    stream, other = PromptStream(prompts, 0), PromptStream(prompts, 1)
    epochs = [[stream.prompt(e * 50 + i).prompt_id for i in range(50)] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert [other.prompt(i).prompt_id for i in range(50)] != epochs[0]


def test_chat_prompts_render_the_template_once(tokenizer: PreTrainedTokenizerFast) -> None:
    made = build_prompts(
        run_config(tasks=spelling(), template="{word}", chat=True, system="Be brief.", num_train=5, num_eval=1),
        tokenizer,
    )
    prompt = made.eval[0]
    word = prompt.columns["word"]
    assert prompt.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": word}]
    assert prompt.text == f"<|system|>Be brief.\n<|user|>{word}\n<|assistant|>"
    direct = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    assert prompt.tokens.tolist() == direct


def test_chat_prompts_have_the_variables_of_the_recipe(tokenizer: PreTrainedTokenizerFast) -> None:
    thinking = tokenizer_of_its_own(tokenizer)
    prompts = {"tasks": spelling(), "template": "{word}", "chat": True, "num_train": 5, "num_eval": 1}
    variables = {"enable_thinking": False}
    prompt = build_prompts(run_config(**prompts, chat_template_kwargs=variables), thinking).eval[0]
    assert prompt.text.endswith("<|assistant|><think></think>")
    direct = thinking.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False, **variables)
    assert prompt.tokens.tolist() == direct
    assert build_prompts(run_config(**prompts), thinking).eval[0].text.endswith("<|assistant|>")
    with pytest.raises(ConfigError, match="did you mean 'enable_thinking'"):
        build_prompts(run_config(**prompts, chat_template_kwargs={"enable_thinkin": False}), thinking)
    plain = tokenizer_of_its_own(tokenizer)
    plain.chat_template = None
    with pytest.raises(ConfigError, match="there is no chat template"):
        build_prompts(run_config(**prompts | {"chat": False}, chat_template_kwargs=variables), plain)


def tokenizer_of_its_own(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same, with a template that knows whether to think."""
    own = copy.copy(tokenizer)
    own.chat_template = _CHAT + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    return own


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for message in messages %}{{ message.update({'role': 'system'}) }}{% endfor %}",
    ],
)
def test_a_chat_template_is_somebody_elses_program_and_stays_in_its_sandbox(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    theirs = copy.deepcopy(tokenizer)
    theirs.chat_template = template
    with pytest.raises(ConfigError, match="chat template"):
        build_prompts(run_config(tasks=spelling(), template="{word}", chat=True, num_train=5, num_eval=1), theirs)


def test_a_line_without_end_is_not_read_into_memory(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "short"}\n{"prompt": "' + "x" * 200 + '"}\n')
    monkeypatch.setattr(dataset, "MAX_LINE_BYTES", 100)
    with pytest.raises(ConfigError, match="line 2 is too long"):
        build_prompts(run_config(dataset=str(path), num_eval=1), tokenizer)


def test_system_without_chat_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        build_prompts(run_config(tasks=spelling(), system="x", num_train=5, num_eval=1), tokenizer)


def test_templates() -> None:
    template = Template("{{{a}}} {b}", field="f")
    assert template.render({"a": 1, "b": "{x}"}) == "{1} {x}"
    assert template.columns == {"a", "b"}
    with pytest.raises(ConfigError, match="did you mean 'word'"):
        Template("{wrod}", field="f").render({"word": 1})
    for bad in ("{a.b}", "{a!r}", "{0}", "{", "{a:>3}"):
        with pytest.raises(ConfigError, match="f "):
            Template(bad, field="f")


def test_datasets_keep_chats_answers_and_columns(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"q": [{"role": "user", "content": f"add 1 to {i}"}], "gold": f"{i + 1}", "level": i, "tags": ["a", "b"]}
        for i in range(8)
    ]
    jsonl, parquet, folder = tmp_path / "d.jsonl", tmp_path / "d.parquet", tmp_path / "d"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(folder))
    for source in (jsonl, parquet, folder):
        config = run_config(dataset=str(source), prompt_column="q", answer_column="gold", num_eval=2)
        made = build_prompts(config, tokenizer)
        prompt = min([*made.train.prompts, *made.eval], key=lambda p: p.columns["level"])
        assert prompt.messages == rows[0]["q"], source
        assert prompt.text == "<|user|>add 1 to 0\n<|assistant|>"
        assert prompt.answer == "1"
        own = {"level": 0, "tags": ["a", "b"], "gold": "1"}
        assert prompt.columns == own | {"question": "add 1 to 0", "answer": "1"}, "an answer has both names"


def test_a_number_as_an_answer_is_text_without_an_exponent(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    numbers = ["0.00001", "1e16", "18.0", "7", "true", "[0.00001]"]
    path.write_text("".join(f'{{"prompt": "p{i}", "answer": {number}}}\n' for i, number in enumerate(numbers)))
    made = build_prompts(run_config(dataset=str(path), num_eval=1), tokenizer)
    answers = {prompt.text: prompt.answer for prompt in [*made.train.prompts, *made.eval]}
    assert [answers[f"p{i}"] for i in range(6)] == ["0.00001", "10000000000000000", "18.0", "7", "true", "[1e-05]"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "not a JSON object"),
        ('{"promt": "x"}', "did you mean 'promt'"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"prompt": 3}', "neither text nor a chat"),
        ('{"prompt": [{"role": "user"}]}', "malformed"),
        ('{"prompt": [{"role": "assistant", "content": "x"}]}', "ends with the assistant"),
    ],
)
def test_malformed_records(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        build_prompts(run_config(dataset=str(path), num_eval=1), tokenizer)


def test_missing_datasets(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    with pytest.raises(ConfigError, match="not found"):
        build_prompts(run_config(dataset=str(tmp_path / "nothing.jsonl"), num_eval=1), tokenizer)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for name in ("nobody/nothing-here", "nobody/nothing-2.5"):
        with pytest.raises(ConfigError, match=r"(?s)cannot be loaded.*where there is a network"):
            build_prompts(run_config(dataset=name, num_eval=1), tokenizer)
    for name in ("data/train.csv", "train.v2", "data/train.jsonl"):
        with pytest.raises(ConfigError, match="not found"):
            build_prompts(run_config(dataset=name, num_eval=1), tokenizer)


def write_configurations(folder: Path, **texts: str) -> str:
    """A folder with a configuration for each keyword, which has one split `train` of two prompts."""
    folder.mkdir()
    named = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in texts)
    (folder / "README.md").write_text(f"---\nconfigs:\n{named}---\n")
    for name, text in texts.items():
        write_rows(folder / f"{name}.jsonl", [{"prompt": f"{text} {i}"} for i in range(2)])
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_configuration_is_that_of_its_data_set_alone(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, streaming: bool
) -> None:
    several = write_configurations(tmp_path / "several", main="one", other="two")
    single = write_configurations(tmp_path / "single", default="three")
    of_main: dict[str, object] = {"dataset": several, "dataset_config": "main", "streaming": streaming}
    made = build_prompts(run_config(**of_main, eval_dataset=single, num_eval=2), tokenizer)
    assert [one.text for one in made.eval] == ["three 0", "three 1"]
    assert sorted(one.text for one in made.train.prompts[:2]) == ["one 0", "one 1"]
    for of_set, text in (
        ({"dataset": single}, "three"),
        ({"dataset": several, "dataset_config": "other"}, "two"),
        ({"dataset": several, "dataset_config": "main"}, "one"),
    ):
        tables = run_config(**of_main, num_eval=2).model_dump()
        tables["eval"]["sets"] = [{"name": "own", "split": "train", **of_set}]
        held_out = held_out_prompts(RunConfig.model_validate(tables).for_set("own"), tokenizer, None, None)
        assert [one.text for one in held_out] == [f"{text} 0", f"{text} 1"]


def test_a_folder_that_the_library_cannot_read_is_told(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    import datasets

    several = write_configurations(tmp_path / "several", main="one", other="two")
    with pytest.raises(ConfigError, match=r"(?s)Config name is missing.*prompts\.dataset_config"):
        build_prompts(run_config(dataset=several, num_eval=1), tokenizer)
    newer = tmp_path / "newer"
    datasets.Dataset.from_list([{"prompt": "x"}]).save_to_disk(str(newer))
    info = newer / "dataset_info.json"
    info.write_text(info.read_text().replace('"Value"', '"Novel"'))
    others = tmp_path / "others"
    others.mkdir()
    (others / "state.json").write_text("{}")
    unrelated = tmp_path / "unrelated"
    unrelated.mkdir()
    for name in ("state.json", "dataset_info.json"):
        (unrelated / name).write_text("{}")
    for folder, said in ((newer, "'Novel' not found"), (others, "FileNotFoundError"), (unrelated, "KeyError")):
        with pytest.raises(ConfigError, match="cannot be loaded") as refused:
            build_prompts(run_config(dataset=str(folder), num_eval=1), tokenizer)
        assert said in str(refused.value)
        assert "hf download" not in str(refused.value)


def test_a_folder_that_is_none_of_a_dataset_is_not_searched_for_minutes(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "MAX_ENTRIES", 10)
    for index in range(11):
        (tmp_path / f"{index}.txt").touch()
    with pytest.raises(ConfigError, match="too many files"):
        build_prompts(run_config(dataset=str(tmp_path), num_eval=1), tokenizer)


def test_json_types() -> None:
    assert to_json_types({1: (np.int64(2), {"b", "a"})}, where="x") == {"1": [2, ["a", "b"]]}
    with pytest.raises(ConfigError, match="not JSON"):
        to_json_types({"a": b"bytes"}, where="x")


def test_demonstrations_mix_kinds_by_weight(tokenizer: PreTrainedTokenizerFast) -> None:
    made = build_prompts(run_config(tasks=spelling(), template="{word}>", num_train=2000, num_eval=10), tokenizer)
    config = WarmStartConfig(
        num_demonstrations=1500,
        demonstrations=[
            DemonstrationConfig(template="{answer}", weight=1),
            DemonstrationConfig(template="{word}", weight=3),
        ],
    )
    pairs = demonstrations(config, made.train.prompts, tokenizer, seed=4)
    again = demonstrations(config, made.train.prompts[::-1], tokenizer, seed=4)
    assert len(pairs) == 1500
    by_prompt = {bytes(p): bytes(c) for p, c in again}
    assert all(by_prompt.get(bytes(p), bytes(c)) == bytes(c) for p, c in pairs)
    copies = 0
    for (prompt_tokens, completion), prompt in zip(pairs, made.train.prompts, strict=False):
        assert prompt_tokens is prompt.tokens
        assert completion[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(completion[:-1]).replace(" ", "")
        assert text in (prompt.answer, prompt.columns["word"])
        copies += text == prompt.columns["word"]
    assert 0.70 < copies / 1500 < 0.80


def write_rows(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("held_out", ["split", "eval_dataset"])
def test_rows_of_one_text_are_one_prompt_or_as_many_as_their_columns(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, held_out: str
) -> None:
    """As environments have them: one text, and columns that differ. What is left out is told."""
    rows: list[dict[str, object]] = [{"prompt": "Count to the target.", "target": n % 40} for n in range(60)]
    data, other = write_rows(tmp_path / "a.jsonl", rows), write_rows(tmp_path / "b.jsonl", rows[35:40])
    given: dict[str, Any] = {"dataset": data, "template": "{question}", "num_train": 20, "num_eval": 5}
    if held_out == "eval_dataset":
        given["eval_dataset"] = other
    with pytest.raises(ConfigError, match=r'prompts\.identity = "row"'):
        build_prompts(run_config(tasks=[], **given), tokenizer)
    made = build_prompts(run_config(tasks=[], **given, identity="row"), tokenizer)
    trained, held = ({one.columns["target"] for one in part} for part in (made.train.prompts, made.eval))
    assert (len(made.train), len(trained), len(made.eval), len(held)) == (20, 20, 5, 5)
    assert not trained & held
    assert len({one.prompt_id for one in made.all}) == 25
    assert count_overlap(made.train.prompts, made.train.prompts[:3], by_row=True) == 3
    rest = {"split": "15 are beyond prompts.num_train", "eval_dataset": "reading ended at prompts.num_train"}
    assert made.report.left_out == f"20 rows repeat another, {rest[held_out]}"


def test_streamed_rows_of_one_text(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "a.jsonl", [{"prompt": "Go.", "target": n} for n in range(200)])
    given: dict[str, Any] = {"dataset": data, "template": "{question}", "num_eval": 4, "streaming": True}
    made = build_prompts(run_config(tasks=[], **given, identity="row"), tokenizer)
    held = {one.columns["target"] for one in made.eval}
    assert len(held) == 4
    assert not held & {made.train.prompt(ordinal).columns["target"] for ordinal in range(150)}


def test_what_is_left_out_is_told(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"p{n}", "answer": "a"} for n in range(12)]
    given: dict[str, Any] = {"template": "{question}", "num_train": 10, "num_eval": 2}
    data = write_rows(tmp_path / "a.jsonl", rows)
    assert build_prompts(run_config(tasks=[], dataset=data, **given), tokenizer).report.left_out == ""
    data = write_rows(tmp_path / "b.jsonl", [*rows, {"prompt": " P3", "answer": "b"}, {"prompt": "q", "answer": "c"}])
    told = build_prompts(run_config(tasks=[], dataset=data, **given), tokenizer).report.left_out
    assert re.fullmatch(r"1 rows repeat another \(prompts\.identity .*\), 1 are beyond prompts\.num_train", told)


@pytest.mark.parametrize(
    ("columns", "is_filled"),
    [
        ({"question": "q", "answer": "a"}, True),
        ({"question": "q", "answer": 0}, True),
        ({"question": "q", "answer": None}, False),
        ({"question": "q"}, False),
        ({"answer": "a"}, False),
        ({"question": "q", "answer": "a", "prompt": None}, False),
    ],
)
def test_whether_a_row_fills_a_template(columns: dict[str, object], is_filled: bool) -> None:
    template = Template("{prompt} {answer}", field="prompts.reference")
    assert template.is_filled_by(columns) == is_filled
    if is_filled:
        assert template.render(columns) == f"q {columns['answer']}"


def test_a_template_writes_no_none(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Neither into prompts nor into what a warm start teaches: it is refused before the run."""
    rows: list[dict[str, object]] = [{"prompt": f"p{n}", "answer": "a" if n else None} for n in range(12)]
    data = write_rows(tmp_path / "a.jsonl", rows)
    given: dict[str, Any] = {"dataset": data, "num_train": 10, "num_eval": 2}
    with pytest.raises(ConfigError, match=r"(?s)prompts\.template names a column in which the row has nothing.*line 1"):
        build_prompts(run_config(tasks=[], template="{answer}", **given), tokenizer)
    config = run_config(tasks=[], template="{question}", **given)
    made = build_prompts(config, tokenizer)
    assert made.report.num_train == 10
    learned = WarmStartConfig(steps=3, demonstrations=[DemonstrationConfig(template="{answer}", weight=1)])
    with pytest.raises(ConfigError, match=r"(?s)warm_start\.demonstrations\[0\]\.template.*warm_start\.steps = 0"):
        check_demonstrations(config.model_copy(update={"warm_start": learned}), made.all)


def test_the_assistants_message_as_an_answer_is_its_text(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """TRL's conversational form: a warm start and references have no JSON. Other lists stay JSON, for rewards."""
    said = {"role": "assistant", "content": "Hello!"}
    answers = [[said], [said, said], [{"role": "user", "content": "?"}], [1, "2"], {"a": 1}]
    rows: list[dict[str, object]] = [{"prompt": f"p{n}", "completion": answer} for n, answer in enumerate(answers)]
    given: dict[str, Any] = {"dataset": write_rows(tmp_path / "a.jsonl", rows), "answer_column": "completion"}
    prompts = sorted(build_prompts(run_config(**given, num_eval=1), tokenizer).all, key=lambda prompt: prompt.text)
    assert [prompt.columns["completion"] for prompt in prompts] == answers
    assert [prompt.answer for prompt in prompts] == ["Hello!", *map(json.dumps, answers[1:])]
    [(_, learned)] = demonstrations(WarmStartConfig(), prompts[:1], CharTokenizer(), seed=0)
    assert CharTokenizer().decode(learned.tolist()) == "Hello!<eos>"
    [reference] = reference_completions("{answer}", prompts[:1], CharTokenizer())
    assert CharTokenizer().decode(reference.segments[0].tokens.tolist()) == "Hello!<eos>"


def test_a_long_post_loses_its_last_lines_and_then_characters(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    posts = ["one\ntwo\nthree", "fits", "no line breaks at all", "first line is too long\nx"]
    rows = [{"post": post, "title": f"t{index}"} for index, post in enumerate(posts)]
    config = run_config(
        dataset=write_rows(tmp_path / "posts.jsonl", rows),
        prompt_column="post",
        template="{title}:{question};",
        max_prompt_tokens=4 + len("one\ntwo"),
        too_long="shorten",
        shorten_column="question",
        num_eval=1,
    )
    made = build_prompts(config, tokenizer)
    texts = sorted(prompt.text for prompt in [*made.train.prompts, *made.eval])
    assert texts == ["t0:one\ntwo;", "t1:fits;", "t2:no line;", "t3:first l;"]
    assert made.report.num_too_long == 0


def test_cut_keeps_the_first_tokens(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("abcdefghij", "short", "zyxwvutsrq")]
    config = run_config(dataset=write_rows(tmp_path / "p.jsonl", rows), max_prompt_tokens=6, too_long="cut", num_eval=1)
    made = build_prompts(config, tokenizer)
    assert sorted(p.text for p in [*made.train.prompts, *made.eval]) == ["abcdef", "short", "zyxwvu"]


def test_prompts_cut_to_the_same_text_are_one_prompt(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = [{"prompt": f"abcdef{tail}"} for tail in ("1", "2", "3")] + [{"prompt": "xyz"}]
    config = run_config(dataset=write_rows(tmp_path / "p.jsonl", rows), max_prompt_tokens=6, too_long="cut", num_eval=1)
    made = build_prompts(config, tokenizer)
    assert made.report.num_duplicates == 2
    assert made.report.overlap == 0
    assert len(made.train) + len(made.eval) == 2


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("end. A sentence. Another. cut", " A sentence. Another."),
        ("one. two.", " two."),
        ("only one.", None),
        ("none", None),
        ("a..", "."),
    ],
)
def test_between_periods(text: str, kept: str | None) -> None:
    assert between_periods(text) == kept


def test_rows_without_two_periods_are_left_out(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("x. First one. y", "nothing", "x. Second one. y")]
    config = run_config(dataset=write_rows(tmp_path / "b.jsonl", rows), between_periods=True, num_eval=1)
    made = build_prompts(config, tokenizer)
    assert sorted(p.text for p in [*made.train.prompts, *made.eval]) == [" First one.", " Second one."]
    config = run_config(dataset=write_rows(tmp_path / "c.jsonl", rows[1:2]), between_periods=True, num_eval=1)
    with pytest.raises(ConfigError, match=r"(?s)no rows.*no prompt with two periods.*prompts\.between_periods"):
        build_prompts(config, tokenizer)


def test_a_query_that_is_cut_ends_with_its_last_whole_sentence(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """As lm-human-preferences has it: the first tokens behind a period, of these what ends with one, or nothing."""
    rows = [{"prompt": f"x.{text}."} for text in ("one. two. three four", "short", "no end in twelve")]
    config = run_config(
        dataset=write_rows(tmp_path / "b.jsonl", rows),
        between_periods=True,
        too_long="cut",
        max_prompt_tokens=12,
        num_eval=1,
    )
    made = build_prompts(config, tokenizer)
    assert sorted(p.text for p in [*made.train.prompts, *made.eval]) == ["one. two.", "short."]
    assert made.report.num_too_long == 1
    config = config.model_copy(
        update={"prompts": config.prompts.model_copy(update={"template": "On. {question}", "max_prompt_tokens": 16})}
    )
    made = build_prompts(config, tokenizer)
    assert sorted(p.text for p in [*made.train.prompts, *made.eval]) == ["On. one. two.", "On. short."]


def test_shortening_needs_a_column_of_the_template(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes the column to shorten"):
        run_config(dataset="x.jsonl", too_long="shorten", num_eval=1)
    dataset = write_rows(tmp_path / "p.jsonl", [{"prompt": "abcdefgh", "note": "n"}, {"prompt": "ijklmnop"}])
    config = run_config(dataset=dataset, max_prompt_tokens=4, too_long="shorten", shorten_column="note", num_eval=1)
    with pytest.raises(ConfigError, match="no column of the template"):
        build_prompts(config, tokenizer)


def test_without_a_limit_prompts_have_the_room_that_completions_leave(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": "a" * length, "answer": ""} for length in (5, 300, 1984, 1985, 2048, 7)]
    config = run_config(dataset=write_rows(tmp_path / "p.jsonl", rows), num_eval=1)  # 2048 positions, 64 of an answer
    report = build_prompts(config, tokenizer).report
    assert (report.num_train + report.num_eval, report.num_too_long) == (4, 2)
    assert (report.max_tokens, report.longest) == (1984, 1984)
    assert config.prompts.max_prompt_tokens is None, "what was asked for stays as it is"


@pytest.mark.parametrize(("num_long", "is_told"), [(0, False), (2, False), (3, True), (20, True)])
def test_many_prompts_that_are_dropped_are_told_loudly(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, num_long: int, is_told: bool
) -> None:
    rows = [{"prompt": f"{i:0{20 if i < num_long else 4}}", "answer": ""} for i in range(40)]
    config = run_config(dataset=write_rows(tmp_path / "p.jsonl", rows), max_prompt_tokens=8, num_eval=1)
    report = build_prompts(config, tokenizer).report
    assert report.num_too_long == num_long
    assert (report.warning is not None) == is_told
    if report.warning is not None:
        assert f"{num_long} of 40 prompts" in report.warning
        assert "prompts.max_prompt_tokens" in report.warning
        assert "more than 8 tokens" in report.warning


def test_records_are_counted_as_lines_are(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """From 1, and with the empty ones: an editor finds the line."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"promt": "b"}\n')
    with pytest.raises(ConfigError, match="line 3 has no column 'prompt'"):
        build_prompts(run_config(dataset=str(path), num_eval=1), tokenizer)
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(ConfigError, match="line 3 is not JSON"):
        build_prompts(run_config(dataset=str(path), num_eval=1), tokenizer)
    table = pyarrow.table({"prompt": ["a", None]})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match="record 2: the prompt"):
        build_prompts(run_config(dataset=str(tmp_path / "p.parquet"), num_eval=1), tokenizer)


@pytest.mark.parametrize(
    ("field", "columns", "told"),
    [
        ("prompts.template", {"question": "q", "answer": "a"}, "write prompts.template = '{question}': '{word}>' is"),
        ("warm_start.demonstrations[0].template", {"question": "q", "answer": "a"}, "template = '{answer}'"),
    ],
)
def test_a_template_for_other_data_is_told_what_suits_this_one(field: str, columns: dict[str, str], told: str) -> None:
    """`slipstream.run("quickstart", prompts=[...])` has the template of the recipe's tasks."""
    with pytest.raises(ConfigError, match="names a column that the row does not have") as refused:
        Template("{word}>", field=field).render(columns)
    assert told in str(refused.value.hint)


def test_the_prompt_column_has_its_own_name_in_templates(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"digits": f"{i}", "nines": f"{9 - i}"}) + "\n" for i in range(4)))
    columns: dict[str, object] = {
        "dataset": str(path),
        "prompt_column": "digits",
        "answer_column": "nines",
        "num_eval": 1,
    }
    texts = [
        [prompt.text for prompt in build_prompts(run_config(template=template, **columns), tokenizer).train.prompts]
        for template in ("{question}>", "{digits}>", "{prompt}>")
    ]
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(ConfigError, match=r"does not have: .*data.jsonl, line 1") as refused:
        build_prompts(run_config(template="{digitz}>", **columns), tokenizer)
    assert refused.value.hint == "did you mean 'digits'?"
    assert refused.value.allowed == "answer, digits, nines, prompt, question"


def test_a_row_without_a_column_that_is_needed_is_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "miss.jsonl"
    rows = [{"prompt": str(i), "nines": "9", "extra": i} for i in range(300)]
    del rows[41]["nines"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns: dict[str, object] = {"dataset": str(path), "answer_column": "nines", "num_eval": 1}
    config = run_config(**columns)
    needed = {"nines": "reward 'r.py:complement'"}
    lacks = r"miss.jsonl, line 42 has no column 'nines', which "
    for streaming in (False, True):
        config = run_config(**columns, streaming=streaming)
        with pytest.raises(ConfigError, match=lacks + "reward 'r.py:complement' needs"):
            build_prompts(config, tokenizer, needed=needed)
        assert build_prompts(config, tokenizer, needed={"extra": "it"}).report.num_eval == 1
    for template in ("{answer}", "{nines}"):
        warm_start = {"steps": 1, "demonstrations": [{"template": template}]}
        config = RunConfig.model_validate(run_config(**columns).model_dump() | {"warm_start": warm_start})
        with pytest.raises(ConfigError, match=lacks + r"warm_start.demonstrations\[0\].template needs"):
            build_prompts(config, tokenizer)


@pytest.mark.parametrize("answer_column", ["answer", "gold"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_whole_chat_has_the_answer_that_is_needed(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, answer_column: str, streaming: bool
) -> None:
    rows = [
        {"chat": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]} for i in range(300)
    ]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    columns = {"dataset": path, "messages_column": "chat", "answer_column": answer_column, "streaming": streaming}
    config = run_config(**columns, num_eval=1)
    made = build_prompts(config, tokenizer, needed={"answer": "it", answer_column: "it"})
    assert {prompt.answer for prompt in made.eval} <= {f"a{i}" for i in range(300)}
    with pytest.raises(ConfigError, match="line 1 has no column 'other', which it needs"):
        build_prompts(config, tokenizer, needed={"other": "it"})
    if not streaming:
        tables = config.model_dump() | {"warm_start": {"steps": 1}}
        check_demonstrations(RunConfig.model_validate(tables), build_prompts(resolve(tables), tokenizer).train.prompts)
    write_rows(tmp_path / "chats.jsonl", [{"prompt": "q"}, *rows])
    with pytest.raises(ConfigError, match=f"line 1 has no column '{answer_column}', which it needs"):
        build_prompts(config, tokenizer, needed={"answer": "it"})


def test_a_fresh_models_alphabet_has_every_character_of_prompts_and_demonstrations(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """It would be <unk> silently; special tokens that a text spells out are themselves."""
    rows = [{"prompt": text, "answer": "ba"} for text in ("ab", "aé", "cü", "ü")]
    config = run_config(dataset=write_rows(tmp_path / "d.jsonl", rows), template="{prompt}>", num_eval=1)
    with pytest.raises(ConfigError, match=r"^a prompt has a character that is not in the alphabet") as refused:
        build_prompts(config, CharTokenizer("ab>c"))
    error = refused.value
    assert "(U+00" in str(error.got)
    assert "3 texts" in str(error.got)
    assert error.hint is not None
    told = tomllib.loads(error.hint.removeprefix("change the text, or model."))["alphabet"]
    assert sorted(told) == sorted("ab>céü")
    for one in config, config.model_copy(update={"prompts": config.prompts.model_copy(update={"streaming": True})}):
        with pytest.raises(ConfigError, match=r"^prompts.template has .*\n.*'>' \(U\+003E\)"):
            build_prompts(one, CharTokenizer("abcéü"))
    build_prompts(config, tokenizer)  # a checkpoint's tokenizer has its own way
    made = build_prompts(config, CharTokenizer(told))
    kinds = [WarmStartConfig(demonstrations=[{"template": one}]) for one in ("{answer}<eos>b", "{answer}!")]
    assert len(demonstrations(kinds[0], made.train.prompts, CharTokenizer(told), seed=0)) == 3
    with pytest.raises(ConfigError, match=r"^warm_start.demonstrations\[0\].template for the prompt '"):
        demonstrations(kinds[1], made.train.prompts, CharTokenizer(told), seed=0)


def test_the_prompt_has_two_names_in_templates_and_no_column_takes_them(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def texts(rows: list[dict[str, object]], **settings: object) -> set[str]:
        path = write_rows(tmp_path / "d.jsonl", rows)
        made = build_prompts(run_config(dataset=path, num_eval=1, **settings), tokenizer)
        return {prompt.text for prompt in (*made.train.prompts, *made.eval)}

    rows: list[dict[str, object]] = [{"text": "x", "prompt": "p"}, {"text": "y", "prompt": "q"}]
    assert texts(rows, prompt_column="text", template="{question}{prompt}") == {"xp", "yq"}, "a column of that name"
    bare = [{"text": row["text"]} for row in rows]
    assert texts(bare, prompt_column="text", template="{question}{prompt}") == {"xx", "yy"}
    both = [row | {"question": "z"} for row in bare]
    with pytest.raises(ConfigError, match=r"line 1 has a column 'question' beside 'text'[\s\S]*rename it, or"):
        texts(both, prompt_column="text")
    assert texts(both[:1] + [{"question": "w"}], prompt_column="question") == {"z", "w"}


@pytest.mark.parametrize(
    ("template", "demonstration", "fields"),
    [
        (r"{word}\n", "{answer}", "prompts.template"),
        ("{word}\n", r"{word}\nAnswer:\t{answer}", "warm_start.demonstrations"),
        (r"{word}\n\n", r"\n{answer}", "prompts.template, warm_start.demonstrations"),
        ("{word}\n", r"\nabla \times {answer} \neq \text{{it}}", None),
        ("{word}\n\t", "{answer}", None),
    ],
)
def test_a_line_break_that_toml_has_not_read_is_told_before_the_run(
    template: str, demonstration: str, fields: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warm_start = {"demonstrations": [{"template": demonstration}]}
    config = resolve("quickstart", {"prompts": {"template": template}, "warm_start": warm_start})
    check_data(config, tmp_path, FromPython())
    told = capsys.readouterr().out
    assert ("two characters" in told) == (fields is not None)
    assert fields is None or rf"WARNING: \n or \t in {fields} is two characters" in told


@pytest.mark.parametrize("num_prompts", [4, 16])
def test_a_reference_that_a_row_lacks_is_told_before_the_first_stage(tmp_path: Path, num_prompts: int) -> None:
    """Where the stage `preferences` comes to that row; sampling for it may take hours."""
    rows: list[dict[str, object]] = [
        {"prompt": f"{n:02}", "summary": "a" if n not in (9, 10) else None} for n in range(20)
    ]
    tables: dict[str, Any] = {
        "stages": ["sft", "preferences", "reward_model", "rl"],
        "model": {"path": "stage:sft"},
        "prompts": {"tasks": [], "dataset": write_rows(tmp_path / "a.jsonl", rows), "num_eval": 1, "num_train": 19}
        | {"template": "{question}", "reference": "{summary}"},
        "sft": {"dataset": write_rows(tmp_path / "b.jsonl", [{"prompt": "1", "completion": "a"}] * 9)},
        "preferences": {"num_prompts": num_prompts, "with_reference": True, "samples_per_prompt": 2},
        "reward_model": {"normalise": "none"},
        "rewards": {"terms": [], "models": [{"path": "stage:reward_model"}]},
        "gold": {"terms": [{"function": "length"}]},
        "warm_start": {"steps": 0},
        "eval": {"num_prompts": 1},
    }
    config = resolve("quickstart", tables)
    if num_prompts < 9:
        check_data(config, tmp_path, FromPython())
        return
    with pytest.raises(
        ConfigError, match=r"(?s)prompts\.reference names a column in which.*the prompt '(09|10)'.*summary = null"
    ):
        check_data(config, tmp_path, FromPython())
