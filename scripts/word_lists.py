"""Download the word lists of TextArena's games: `.venv-verifiers/bin/python scripts/word_lists.py FOLDER`.

`make verifiers-env` does so, into the environment's own folder, where nltk looks. Without a network it says what does
not work then, and is no failure: all other environments work. Runs in that environment, not in Slipstream's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

NEEDED = ("words", "averaged_perceptron_tagger_eng")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where nltk looks for data")
    folder = parser.parse_args().folder.resolve()
    import nltk

    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    lacking = [name for name in NEEDED if not nltk.download(name, download_dir=str(folder), quiet=True)]
    if lacking:
        print(f"not downloaded into {folder}: {', '.join(lacking)}. TextArena's games do not work without them.")


if __name__ == "__main__":
    main()
