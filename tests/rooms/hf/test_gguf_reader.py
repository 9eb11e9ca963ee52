"""Metadata of GGUF files as the package's own reader shows it, for the library's conversions."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import modeling_gguf_pytorch_utils

from pipeload.checkpoint.gguf import read_gguf, read_strings
from pipeload.errors import CheckpointError
from pipeload.hf.gguf_reader import LightReader, light_reader, names_once

if TYPE_CHECKING:
    from pathlib import Path

gguf: Any = pytest.importorskip("gguf")
library: Any = modeling_gguf_pytorch_utils
WORDS = ["a", "", "b c", "\u00e9\u20ac", "<|end|>"] * 7


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a value of every kind."""
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_name("a model \u00e9")
    for key, value in {"context_length": 64, "embedding_length": 8, "block_count": 1}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 12345.678)
    writer.add_key_value("llama.a", -3, gguf.GGUFValueType.INT8)
    writer.add_key_value("llama.b", 2**40, gguf.GGUFValueType.UINT64)
    writer.add_key_value("llama.c", 0.1, gguf.GGUFValueType.FLOAT64)
    writer.add_bool("llama.d", True)
    writer.add_array("llama.e", [1, -2, 3])
    writer.add_array("llama.f", [0.5, 0.25])
    writer.add_array("llama.g", [True, False])
    writer.add_array("llama.h", ["alone"])
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * len(WORDS))
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def values(reader: Any) -> dict[str, Any]:
    """What the library takes out of a reader."""
    return {key: library.read_field(reader, key) for key in reader.fields}


def test_values_are_the_packages_own(path: Path) -> None:
    """By the library's way of reading them, types and all."""
    ours, theirs = values(LightReader(path)), values(gguf.GGUFReader(path))
    wanted = {key: value for key, value in theirs.items() if not key.startswith("GGUF.")}
    assert ours == wanted
    kinds = {key: [type(one) for one in value] for key, value in ours.items()}
    assert kinds == {key: [type(one) for one in value] for key, value in wanted.items()}
    assert ours["tokenizer.ggml.tokens"] == WORDS
    assert [tensor.name for tensor in LightReader(path).tensors] == ["token_embd.weight"]


def test_the_library_makes_the_same_of_it(path: Path) -> None:
    """Configuration and tokenizer."""
    wanted = library.load_gguf_checkpoint(str(path))
    with light_reader():
        found = library.load_gguf_checkpoint(str(path))
    del found["ignore"], wanted["ignore"]
    assert found == wanted
    assert found["tokenizer"]["tokens"] == WORDS


def test_only_inside_and_in_this_thread(path: Path) -> None:
    """Others get the package's reader: they may want tensors."""
    readers: list[Any] = []
    with light_reader():
        thread = threading.Thread(target=lambda: readers.append(gguf.GGUFReader(path)))
        thread.start()
        thread.join()
        assert isinstance(gguf.GGUFReader(path), LightReader)
        assert not isinstance(readers[0], LightReader)
    original = gguf.GGUFReader
    assert isinstance(original(path), original)


def test_a_file_that_changes_meanwhile(path: Path) -> None:
    """Its strings are not where they were."""
    metadata, _ = read_gguf(path)
    tokens: Any = metadata["tokenizer.ggml.tokens"]
    path.write_bytes(path.read_bytes()[: tokens.stop - 3])
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        read_strings(path, tokens)


def test_names_are_made_once() -> None:
    """However often they are asked for, inside; they are those that the package makes."""
    original = gguf.get_tensor_name_map
    with names_once():
        made = [gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) for _ in range(2)]
        other = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    assert made[0] is made[1] is not other
    assert gguf.get_tensor_name_map is original
    assert made[0].mapping == original(gguf.MODEL_ARCH.LLAMA, 2).mapping
