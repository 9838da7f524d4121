"""A tokenizer for the tests of the preparation."""

import pytest

from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from tests.data.prepare.helpers import SOURCES


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_sentencepiece([str(path) for path in SOURCES], tmp_path_factory.mktemp("tok"), vocab_size=600)
