"""What a GGUF file is to the library: names, and the order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeload.checkpoint.headers import TensorEntry
from pipeload.errors import CheckpointError
from pipeload.hf import gguf
from pipeload.hf.gguf import _change, gguf_file_of, whole_config
from tests.support.gguf_models import save_gguf


def entry(*shape: int) -> TensorEntry:
    return TensorEntry("x", Path("m.gguf"), "F32", shape, 0, 0)


def order(processor: Any, name: str, one: TensorEntry) -> tuple[int, ...]:
    """Of rows, all that is changed."""
    change, shape = _change(processor, name, one)
    assert not change.added
    assert shape == one.shape
    return change.order


class Shuffle:
    """A processor that does what it is told to numbers of rows."""

    def __init__(self, order: list[int]) -> None:
        self._order = order

    def process(self, weights: Any, name: str) -> Any:
        return gguf.library.GGUFTensor(weights[np.array(self._order)], name, {})


@pytest.mark.parametrize(("heads", "keys"), [(4, 2), (2, 1), (8, 8)])
def test_llamas_order(heads: int, keys: int) -> None:
    """That of one head of queries or keys; nothing else is in another order."""
    config = {"num_attention_heads": heads, "num_key_value_heads": keys}
    processor = gguf.library.LlamaTensorProcessor(config=config)
    head = 64 // heads
    half = head // 2
    wanted = tuple(2 * row for row in range(half)) + tuple(2 * row + 1 for row in range(half))
    assert order(processor, "blk.0.attn_q.weight", entry(64, 8)) == wanted
    assert order(processor, "blk.0.attn_q.bias", entry(64)) == wanted
    assert order(processor, "blk.3.attn_k.weight", entry(head * keys, 8)) == wanted
    for name in ("blk.0.attn_v.weight", "blk.0.ffn_up.weight", "output.weight"):
        assert order(processor, name, entry(64, 8)) == ()


def test_other_changes() -> None:
    """Something is added to norms' weights, or a dimension of one to a shape."""
    norms = gguf.library.Gemma2TensorProcessor()
    assert _change(norms, "blk.0.attn_norm.weight", entry(64)) == (((), -1), (64,))
    assert _change(norms, "blk.0.attn_q.weight", entry(64, 8)) == (((), 0), (64, 8))
    shared = gguf.library.Qwen2MoeTensorProcessor()
    assert _change(shared, "blk.0.ffn_gate_inp_shexp.weight", entry(64)) == (((), 0), (1, 64))


def test_heads_that_do_not_divide_rows() -> None:
    """The file's own numbers contradict each other."""
    processor = gguf.library.LlamaTensorProcessor(
        config={"num_attention_heads": 4, "num_key_value_heads": 4}
    )
    with pytest.raises(
        CheckpointError, match=r"'blk\.0\.attn_q\.weight' .* has 30 rows, which are"
    ):
        order(processor, "blk.0.attn_q.weight", entry(30, 8))


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([0, 1, 2, 3], ()),
        ([1, 0, 3, 2], (1, 0)),
        ([1, 0, 2, 3], (1, 0, 2, 3)),
        ([3, 2, 1, 0], (3, 2, 1, 0)),
        ([0, 1, 3, 2, 4, 5, 7, 6], (0, 1, 3, 2)),
        ([1, 0, 2, 3, 4, 5], (1, 0, 2, 3, 4, 5)),
        ([0, 2, 1, 3, 4, 5, 7, 6], (0, 2, 1, 3, 4, 5, 7, 6)),
    ],
)
def test_the_smallest_group(rows: list[int], wanted: tuple[int, ...]) -> None:
    """After which an order begins again; all rows, if it never does."""
    assert order(Shuffle(rows), "x", entry(len(rows), 2)) == wanted


def test_a_head_in_another_part(tmp_path: Path) -> None:
    """The library looks for one in the first file alone."""
    save_gguf(tmp_path, files=3, kinds=("F32",), num_hidden_layers=2)
    first = next(tmp_path.glob("*-00001-of-*"))
    (tmp_path / "one").mkdir()
    one = save_gguf(tmp_path / "one", kinds=("F32",), num_hidden_layers=2)
    for path, wanted in ((first, False), (one, True)):
        parsed = {"config": {"tie_word_embeddings": True}}
        assert whole_config(str(path), parsed)["config"]["tie_word_embeddings"] is wanted


def test_the_file_of_a_model() -> None:
    """Is in the configuration of one that plain has loaded."""

    class Said:
        quantization_config: Any = None

    said = Said()
    assert gguf_file_of(said) == {}
    said.quantization_config = {"gguf_file": "a"}
    assert gguf_file_of(said) == {}
    said.quantization_config = type("Config", (), {"gguf_file": "a.gguf"})()
    assert gguf_file_of(said) == {"gguf_file": "a.gguf"}
