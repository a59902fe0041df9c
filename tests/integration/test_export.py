"""What a run leaves behind is a Hugging Face checkpoint: transformers gives the same answers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.evals.evaluate import evaluate_model
from slipstream.evals.target import eval_target


def test_transformers_gives_the_same_greedy_answers(trained: Path) -> None:
    checkpoint, config = eval_target(trained)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    answers = evaluate_model(trained).greedy_answers
    assert len(answers) == 50
    batch = tokenizer([answer.prompt for answer in answers], return_tensors="pt", padding=True, padding_side="left")
    with torch.inference_mode():
        tokens = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=False,
            max_new_tokens=config.generator.max_new_tokens,
        )
    texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert texts == [answer.text for answer in answers]
    assert len(set(texts)) > 20


def test_evaluation_afterwards_equals_the_one_inside_the_run(trained: Path) -> None:
    after = json.loads((trained / "summary.json").read_text())["eval"]["after"]
    result = evaluate_model(trained)
    assert (result.accuracy, result.sampled_accuracy) == (after["accuracy"], after["sampled_accuracy"])
    assert 0 < result.accuracy < 1
    shown = json.loads((trained / "samples.json").read_text())
    assert shown
    for sample, answer in zip(shown, result.greedy_answers, strict=False):
        assert (sample["prompt"], sample["after"]) == (answer.prompt, answer.text)
