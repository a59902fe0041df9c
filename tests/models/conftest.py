from __future__ import annotations

import pytest
import transformers
from hf_cases import oracle


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(case) -> (transformers model, folder it was saved to), each made once."""
    made = {}
    transformers.utils.logging.disable_progress_bar()

    def make(case):
        if case not in made:
            model, folder = oracle(case), tmp_path_factory.mktemp(case)
            model.save_pretrained(folder)
            made[case] = model, folder
        return made[case]

    return make
