"""Which tokenizer and which format a folder or file gets."""

import json
import shutil

import pytest

from engine.chat.chatml import ChatMLRenderer
from engine.chat.kimi import K2Renderer, K25Renderer
from engine.chat.load import default_system_of, load_renderer, load_tokenizer
from engine.errors import ChatError
from tests.engine.chat.dialogues import SMALL_RANKS, hf_description, small_hf, small_kimi


@pytest.fixture
def kimi_folder(tmp_path):
    shutil.copy(SMALL_RANKS, tmp_path / "tiktoken.model")
    return tmp_path


@pytest.fixture
def hf_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(hf_description(True))
    return tmp_path


def test_kimi(kimi_folder):
    """K2 unless the configuration says K2.5, whose mode is the caller's."""
    assert load_tokenizer(kimi_folder).fingerprint == small_kimi().fingerprint
    assert isinstance(load_renderer(kimi_folder), K2Renderer)
    (kimi_folder / "config.json").write_text('{"model_type": "kimi_k25"}')
    thinking, instant = load_renderer(kimi_folder), load_renderer(kimi_folder, thinking=False)
    assert isinstance(thinking, K25Renderer)
    assert isinstance(instant, K25Renderer)
    assert len(instant.generation_header()) == len(thinking.generation_header()) + 1


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_chatml(hf_folder, name):
    """With the system text of the model's own template."""
    template = "{{ '<|im_start|>system\\nYou are S.<|im_end|>\\n' }}"
    text = json.dumps({"chat_template": template}) if name.endswith("json") else template
    (hf_folder / name).write_text(text)
    renderer = load_renderer(hf_folder)
    assert isinstance(renderer, ChatMLRenderer)
    assert renderer.default_system == "You are S."
    assert renderer.tokenizer.fingerprint == small_hf().fingerprint


@pytest.mark.parametrize(
    ("template", "system"),
    [
        ("", None),
        ("{{ '<|im_start|>system\nYou are S.<|im_end|>' }}", "You are S."),
        ("{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>' }}", None),
        ("{{ '<|im_start|>user' }}", None),
    ],
)
def test_default_system_text(template, system):
    """Only where it is spelled out."""
    assert default_system_of(template) == system


def test_what_cannot_chat(tmp_path, hf_folder):
    """Said in one line."""
    other = json.loads(hf_description(True))
    other["added_tokens"] = other["added_tokens"][2:]
    (hf_folder / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ChatError, match="no <|im_start|> in its vocabulary".replace("|", r"\|")):
        load_renderer(hf_folder)
    with pytest.raises(ChatError, match=r"neither tiktoken.model nor tokenizer.json"):
        load_renderer(tmp_path / "nothing")
    (hf_folder / "tokenizer.json").write_text(hf_description(True))
    (hf_folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ChatError, match="is no JSON"):
        load_renderer(hf_folder)
