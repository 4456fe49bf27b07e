from pathlib import Path

import pytest


@pytest.fixture
def text():
    return Path("/app/hello.txt").read_text()


def test_greets(text):
    assert text.strip() == "hello Ada"


@pytest.mark.parametrize("word", ["hello", "Ada"])
def test_words(text, word):
    assert word in text
