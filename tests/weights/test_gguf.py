from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from tests.weights.gguf_writing import tensors, write
from tokenspeed.types import ConfigError
from tokenspeed.weights.gguf import GGUFFile
from tokenspeed.weights.gguf_checkpoint import GGUFCheckpoint


def checkpoint(path: Path) -> GGUFCheckpoint:
    return GGUFCheckpoint(path, {})


def _every_kind(writer: GGUFWriter) -> None:
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_int32("t.i32", -5)
    writer.add_uint64("t.u64", 1 << 60)
    writer.add_int64("t.i64", -(1 << 60))
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.text", "Grüße ▁ 你好")
    writer.add_array("t.texts", ["", "a", "▁the", "\n"])
    writer.add_array("t.ints", [3, -1, 2])
    writer.add_array("t.floats", [0.5, -1.25])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(tmp_path / "llama.gguf", extra=_every_kind)


def test_metadata_and_tensors_are_those_the_reference_reader_finds(llama: Path) -> None:
    ours, theirs = GGUFFile(llama), GGUFReader(llama)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = ours.metadata[key]
        found: object = value.tolist() if isinstance(value, np.ndarray) else value
        assert found == field.contents(), key
    assert ours.metadata["t.texts"] == ["", "a", "▁the", "\n"]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.start, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        np.testing.assert_array_equal(ours.raw(tensor.name).view(np.float32).reshape(info.shape), tensor.data)


def test_tensors_lie_on_the_files_own_alignment(tmp_path: Path) -> None:
    writer_alignment = 256
    path = write(tmp_path / "a.gguf", extra=lambda writer: writer.add_custom_alignment(writer_alignment))
    for name, array in tensors().items():
        assert GGUFFile(path).tensors[name].start % writer_alignment == 0
        np.testing.assert_array_equal(GGUFFile(path).raw(name).view(np.float32).reshape(array.shape), array)


def test_a_file_cut_anywhere_is_refused_with_its_name(llama: Path, tmp_path: Path) -> None:
    whole = llama.read_bytes()
    cut = tmp_path / "cut.gguf"
    header = GGUFFile(llama).tensors["token_embd.weight"].start
    for size in [*range(0, header, 7), header + 100, len(whole) // 2, len(whole) - 64]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf.*(cut off|cannot be read|not a GGUF|damaged)"):
            checkpoint(cut)


def test_the_tensor_beyond_the_end_is_named(llama: Path) -> None:
    whole = llama.read_bytes()
    last = max(GGUFFile(llama).tensors.items(), key=lambda item: item[1].start)[0]
    llama.write_bytes(whole[:-200])
    with pytest.raises(ConfigError, match=rf"llama\.gguf is cut off: {last} ends at byte \d+, but the file has \d+"):
        checkpoint(llama)


def test_a_header_is_enough_where_weights_are_not_wanted(llama: Path) -> None:
    file = GGUFFile(llama)
    llama.write_bytes(llama.read_bytes()[: file.tensors["token_embd.weight"].start])
    assert GGUFCheckpoint(llama, {}, header_only=True).config.hidden_size == 64


def test_damage_never_ends_in_another_error(llama: Path, tmp_path: Path) -> None:
    whole = bytearray(llama.read_bytes())
    header = GGUFFile(llama).tensors["token_embd.weight"].start
    rng = np.random.default_rng(0)
    broken = tmp_path / "broken.gguf"
    refused: list[str] = []
    for _ in range(400):
        damaged = bytearray(whole)
        for at in rng.integers(0, header, 3):
            damaged[at] = rng.integers(0, 256)
        broken.write_bytes(damaged)
        try:
            checkpoint(broken)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(broken) in text for text in refused)


def _patched(path: Path, at: int, value: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


def test_foreign_files_are_refused(tmp_path: Path, llama: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ConfigError, match=r"other\.gguf is not a GGUF file: it begins with b'PK"):
        checkpoint(other)
    with pytest.raises(ConfigError, match=r"none\.gguf cannot be read"):
        checkpoint(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ConfigError, match=r"empty\.gguf cannot be read"):
        checkpoint(tmp_path / "empty.gguf")
    with pytest.raises(ConfigError, match=r"of version 1; .* 2 and 3 are supported"):
        checkpoint(_patched(llama, 4, struct.pack("<I", 1)))
    with pytest.raises(ConfigError, match="big-endian"):
        checkpoint(_patched(llama, 4, struct.pack(">I", 3)))


def test_types_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    rows = np.zeros((50, 292), np.uint8)
    contents = tensors()
    del contents["token_embd.weight"]
    path = write(
        tmp_path / "q8k.gguf",
        contents=contents,
        packed={"token_embd.weight": (rows, GGMLQuantizationType.Q8_K)},
        settings={"embedding_length": 256},
    )
    with pytest.raises(ConfigError, match=r"stores token_embd\.weight as Q8_K, which is not supported"):
        checkpoint(path)
    data = path.read_bytes()
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    with pytest.raises(ConfigError, match=r"output_norm\.weight' in the unknown tensor type 77"):
        checkpoint(_patched(path, at, struct.pack("<I", 77)))
