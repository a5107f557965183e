"""Text to ids and back: real tokenizers against stored ids, small ones against the rules."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from tests import assets
from tests.text.scripted import portions
from tokenspeed.text.detokenizer import Detokenizer
from tokenspeed.text.tokenizer import Tokenizer, load_tokenizer
from tokenspeed.types import ConfigError, InvalidRequest

REFERENCE = Path(__file__).parent.parent / "data" / "reference"
MIXED = "def f(x):\n\treturn  'naïve' + \"漢字\" # 😊 12345\r\n\n    e\u0301\u200b▁<x>  \n"

slow = pytest.mark.slow


@cache
def loaded(asset: Callable[[], Path]) -> Tokenizer:
    return load_tokenizer(asset())


GGUF_MODELS = [
    pytest.param("smollm2", assets.smollm2, id="smollm2"),
    pytest.param("gemma3", assets.gemma3, id="gemma3"),
    pytest.param("qwen25c05", assets.qwen25_coder_05b, id="qwen25c05", marks=slow),
    pytest.param("qwen25c15", assets.qwen25_coder_15b, id="qwen25c15", marks=slow),
]


@pytest.mark.parametrize(("name", "asset"), GGUF_MODELS)
def test_prompts_of_real_models_have_the_stored_ids(name: str, asset: Callable[[], Path]) -> None:
    tokenizer = loaded(asset)
    for prompt in json.loads((REFERENCE / f"{name}.json").read_text())["prompts"].values():
        assert tokenizer.encode(prompt["text"]) == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["output_ids"], skip_special_tokens=False) == prompt["output_text"]


@pytest.mark.parametrize(("name", "asset"), GGUF_MODELS)
def test_bytes_of_real_tokens_make_the_text(name: str, asset: Callable[[], Path]) -> None:
    tokenizer = loaded(asset)
    texts = [MIXED, *(p["text"] for p in json.loads((REFERENCE / f"{name}.json").read_text())["prompts"].values())]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert whole == tokenizer.decode(ids, skip_special_tokens=False)
        assert whole == tokenizer.backend.decode(ids, skip_special_tokens=False)
        if not name.startswith("qwen"):  # whose normaliser composes characters
            assert whole.replace("▁", " ") == text.replace("▁", " ")
        for size in (1, 3):
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
            assert "".join(map(detokenizer.push, portions(ids, size))) == whole


@pytest.mark.parametrize(
    ("asset", "vocab_size", "bos_id", "eos_ids", "adds_bos"),
    [
        (assets.smollm2, 49152, 1, (2,), False),
        (assets.gemma3, 262144, 2, (1,), True),
        pytest.param(assets.qwen25_coder_05b, 151665, 151643, (151645,), False, marks=slow),
    ],
)
def test_real_files_say_what_is_special(
    asset: Callable[[], Path], vocab_size: int, bos_id: int, eos_ids: tuple[int, ...], adds_bos: bool
) -> None:
    tokenizer = loaded(asset)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (vocab_size, bos_id, eos_ids)
    assert tokenizer.adds_bos == adds_bos
    assert {bos_id, *eos_ids} <= tokenizer.special_ids
    assert tokenizer.decode([bos_id, *eos_ids]) == ""


@slow
@pytest.mark.parametrize(
    ("asset", "limit"), [(assets.smollm2, 1.0), (assets.qwen25_coder_05b, 3.0), (assets.gemma3, 3.0)]
)
def test_building_from_gguf_is_quick(asset: Callable[[], Path], limit: float) -> None:
    path = asset()
    start = time.process_time()
    load_tokenizer(path)
    assert time.process_time() - start < limit


@slow
@pytest.mark.parametrize(("asset", "name"), [(assets.gemma3, "gemma3"), (assets.qwen25_coder_05b, "qwen3")])
def test_gguf_agrees_with_tokenizer_json(asset: Callable[[], Path], name: str) -> None:
    ours, theirs = loaded(asset), load_tokenizer(assets.tokenizer(name))
    source = Path(json.__file__).read_text() + MIXED.replace("▁", " ")
    for start in range(0, len(source), 100):
        text = source[start : start + 777]
        assert ours.encode(text) == theirs.encode(text)


@slow
@pytest.mark.parametrize("name", assets.TOKENIZERS)
def test_published_tokenizers_give_the_text_back(name: str) -> None:
    tokenizer = load_tokenizer(assets.tokenizer(name))
    ids = tokenizer.encode(MIXED, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids)
    assert tokenizer.eos_ids
    assert all(token.content for token in tokenizer.added_tokens.values())


def small_backend(**tokens: int) -> tokenizers.Tokenizer:
    """Byte-level, without merges; `tokens` are added at their ids, above 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **files: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_is_read_with_what_stands_beside_its_tokenizer(tmp_path: Path) -> None:
    backend = small_backend()
    backend.add_tokens([AddedToken(f"<{k}>", normalized=False) for k in range(4)])
    folder = save(
        tmp_path,
        backend,
        special_tokens_map={"bos_token": "<3>", "eos_token": {"content": "<1>"}},
        tokenizer_config={"bos_token": {"content": "<0>"}, "model_max_length": 5, "pad_token": None},
        generation_config={"eos_token_id": [257, 258]},
        config={"eos_token_id": 259},
    )
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = load_tokenizer(path)
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, (257, 258, 259))
        assert tokenizer.vocab_size == 260


def test_tokens_that_are_named_special_become_special(tmp_path: Path) -> None:
    backend = small_backend()
    backend.add_tokens([AddedToken("<a>"), AddedToken("<b>", special=True), "<c>"])
    tokenizer = load_tokenizer(save(tmp_path, backend, tokenizer_config={"eos_token": "<a>", "unk_token": "!"}))
    a, b, c = (tokenizer.token_id(text) for text in ("<a>", "<b>", "<c>"))
    assert tokenizer.special_ids == {a, b, tokenizer.token_id("!")}
    assert tokenizer.decode(tokenizer.encode("x<a><b><c>y!z")) == "x<c>yz"
    assert c is not None


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    backend = small_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = load_tokenizer(save(tmp_path, backend))
    assert len(tokenizer.encode("abcd")) == 4


def test_special_tokens_go_around_a_text_that_stands_alone(tmp_path: Path) -> None:
    backend = small_backend()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    tokenizer = load_tokenizer(save(tmp_path, backend, tokenizer_config={"bos_token": "<s>"}))
    a = tokenizer.token_id("a")
    assert tokenizer.encode("a") == tokenizer.surround([a]) if a is not None else False
    assert tokenizer.encode("a") == [256, a, 257]
    assert tokenizer.encode("a", add_special_tokens=False) == [a]
    assert tokenizer.encode("") == [256, 257]
    assert tokenizer.adds_bos


def test_bytes_and_texts_of_tokens(tmp_path: Path) -> None:
    backend = small_backend()
    backend.add_tokens(["<é >"])
    tokenizer = load_tokenizer(save(tmp_path, backend))
    ids = tokenizer.encode("é <é >", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9", b" ", "<é >".encode()]
    assert [tokenizer.token_text(i) for i in ids] == ["\ufffd", "\ufffd", " ", "<é >"]
    assert [tokenizer.spelling(i) for i in ids] == ["Ã", "©", "Ġ", "<é >"]
    assert tokenizer.token_bytes(4000) == b""


@pytest.mark.parametrize("token_id", [-1, 256])
def test_ids_outside_the_vocabulary_are_refused(token_id: int, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, small_backend()))
    with pytest.raises(InvalidRequest, match=rf"token id {token_id} is not in the vocabulary \[0, 256\)"):
        tokenizer.decode([1, token_id])


def test_a_lone_surrogate_is_refused_and_nul_is_not(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, small_backend()))
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.encode("a\ud83c")
    assert tokenizer.decode(tokenizer.encode("a\0b")) == "a\0b"


def test_a_space_that_the_tokenizer_puts_before_text_is_taken_away(tmp_path: Path) -> None:
    vocab = {text: i for i, text in enumerate(["<unk>", "▁", "a", "▁a", "<s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    tokenizer = load_tokenizer(save(tmp_path, backend))
    assert tokenizer.strips_leading_space
    for text in ("a a", " a", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == backend.decode(ids)
        detokenizer = Detokenizer(tokenizer, strip_leading_space=tokenizer.strips_leading_space)
        assert "".join(detokenizer.push([i]) for i in ids) == text


def unusable(folder: Path, kind: str) -> Path:
    """A path that holds no usable tokenizer."""
    if kind == "other decoder":
        backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
        backend.decoder = decoders.WordPiece()
        return save(folder, backend)
    if kind == "no decoder":
        backend = small_backend()
        backend.decoder = None
        return save(folder, backend)
    if kind == "bad config":
        save(folder, small_backend())
        (folder / "tokenizer_config.json").write_text("{")
        return folder
    if kind == "config of another shape":
        return save(folder, small_backend(), tokenizer_config=[1])
    (folder / "tokenizer.json").write_text('{"model": 1')
    return folder if kind == "damaged" else folder / "nowhere"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "has no tokenizer.json"),
        ("damaged", "tokenizer.json is not a tokenizer: "),
        ("other decoder", "has a decoder of WordPiece; supported are byte-level"),
        ("no decoder", "has a decoder of no kind"),
        ("bad config", "tokenizer_config.json is not valid JSON"),
        ("config of another shape", "tokenizer_config.json must hold a JSON object"),
    ],
)
def test_what_cannot_be_used_is_named(kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(unusable(tmp_path, kind))
