"""Models that tests of devices share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.engine.tiny_models import FAMILIES, NUM_TOKENS, VOCAB, Oracle, save_tiny_model


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(request.param, folder)
    texts = torch.randint(0, VOCAB, (2, NUM_TOKENS))
    with torch.no_grad():
        logits = model(texts).logits.numpy()
    assert 0.3 < logits.std() < 5
    return Oracle(folder, (texts[0].tolist(), texts[1].tolist()), (logits[0], logits[1]))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        save_tiny_model(family, path)
        return path

    return folder
