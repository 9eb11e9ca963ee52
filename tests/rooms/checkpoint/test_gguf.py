"""GGUF headers: where each tensor's bytes are, and what of a broken file is said."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeload.checkpoint import gguf_fields
from pipeload.checkpoint.gguf import BLOCKS, StringArray, open_gguf, read_gguf
from pipeload.errors import CheckpointError, ReadError
from tests.support.gguf_files import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    F32,
    STRING,
    U32,
    U64,
    Tensor,
    pack,
    pair,
    strings,
    text,
)

if TYPE_CHECKING:
    from pathlib import Path

NUMBER = struct.pack("<I", 7)
SPLIT = ("split.no", "split.count", "split.tensors.count")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all the examples of a property: each overwrites it."""
    return tmp_path_factory.mktemp("scratch") / "model.gguf"


def write(path: Path, *args: Any, **options: Any) -> Path:
    path.write_bytes(pack(*args, **options))
    return path


def split(number: int, count: int, tensors: int) -> list[bytes]:
    """The metadata of one of several files."""
    values = zip(SPLIT, (number, count, tensors), strict=True)
    return [ARCHITECTURE, *(pair(key, U32, struct.pack("<I", value)) for key, value in values)]


def write_parts(folder: Path, count: int, stem: str = "m") -> Path:
    """A model in so many files, a tensor in each; returns the first."""
    for number in range(count):
        name = f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"
        write(folder / name, [Tensor(f"t{number}")], split(number, count, count))
    return folder / f"{stem}-00001-of-{count:05d}.gguf"


# Files that are right.


def test_entries_are_the_packages_own(tmp_path: Path) -> None:
    """Types, shapes and byte ranges are those that the format's own reader finds."""
    np: Any = pytest.importorskip("numpy")
    gguf: Any = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("a model")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b c", "", "\u00e9"])
    writer.add_array("llama.attention.head_count_kv", [1, 2, 3])
    writer.add_rope_freq_base(10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    rows = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.Q4_0, kinds.Q5_1, kinds.Q8_0, kinds.BF16):
        writer.add_tensor(f"x.{kind.name}", gguf.quantize(rows, kind), raw_dtype=kind)
    writer.add_tensor("x.F16", rows[0, :5].astype(np.float16))
    writer.add_tensor("x.F32", rows.reshape(2, 3, 512))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(path)
    reader = gguf.GGUFReader(path)
    assert {*found.checkpoint.entries} == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        entry = found.checkpoint.entries[tensor.name]
        assert (entry.dtype, entry.nbytes) == (tensor.tensor_type.name, int(tensor.n_bytes))
        assert entry.shape == tuple(int(length) for length in reversed(tensor.shape))
        assert path.read_bytes()[entry.start : entry.stop] == tensor.data.tobytes()
        assert entry.stamp == (path.stat().st_size, path.stat().st_mtime_ns)
    said = found.metadata
    assert found.architecture == "llama"
    assert said["general.name"] == "a model"
    assert said["llama.rope.freq_base"] == 10000.0
    assert said["tokenizer.ggml.add_bos_token"] is True
    assert list(said["llama.attention.head_count_kv"]) == [1, 2, 3]  # type: ignore[arg-type]
    tokens = said["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    assert (len(tokens), tokens.count) == (4, 4)
    wanted = b"".join(map(text, ("a", "b c", "", "\u00e9")))
    assert path.read_bytes()[tokens.start : tokens.stop] == wanted


def test_blocks_are_the_packages_own() -> None:
    """How many values and bytes a block of each type has."""
    constants: Any = pytest.importorskip("gguf.constants")
    theirs = {kind.name: sizes for kind, sizes in constants.GGML_QUANT_SIZES.items()}
    assert {name: theirs[name] for name in BLOCKS} == {k: tuple(b) for k, b in BLOCKS.items()}


def test_a_header_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is read on, wherever a string or a number is cut."""
    values = [f"word {number}" * (number % 5) for number in range(300)]
    pairs = [ARCHITECTURE, pair("tokenizer.ggml.tokens", ARRAY, strings(*values))]
    path = write(tmp_path / "m.gguf", [Tensor("a"), Tensor("b")], pairs)
    wanted = read_gguf(path)
    for nbytes in (1, 7, 64):
        monkeypatch.setattr(gguf_fields, "_BLOCK_BYTES", nbytes)
        assert read_gguf(path) == wanted


def test_a_split_model(tmp_path: Path) -> None:
    """Its files are found by the name of the first, and are one checkpoint."""
    first = write_parts(tmp_path, 3, stem="a-00001-of-00003.gguf")
    found = open_gguf(first)
    assert [path.name[-19:-5] for path in found.checkpoint.files] == [
        f"{number:05d}-of-00003" for number in (1, 2, 3)
    ]
    assert {*found.checkpoint.entries} == {"t0", "t1", "t2"}
    assert found.checkpoint.entries["t2"].file == found.checkpoint.files[2]


def test_what_stands_behind_is_left_alone(tmp_path: Path) -> None:
    """Padding, or what another tool has put there."""
    path = write(tmp_path / "m.gguf", behind=b"PK\x03\x04 and so on")
    assert [*open_gguf(path).checkpoint.entries] == ["a"]


# Files that are wrong.


def big(value: int) -> bytes:
    return struct.pack("<Q", value)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"cut": 10**6}, "begins with b'', not with 'GGUF'"),
    "not GGUF": ({"magic": b"PK\x03\x04"}, r"begins with b'PK\\x03\\x04', not with"),
    "version 1": ({"version": 1}, "is of version 1, wanted 2 or 3"),
    "big-endian": ({"version": 3 << 24}, "it is big-endian"),
    "cut in the tensors": ({"cut": 1}, "is truncated: got .* 'a' .* is the first that is not whol"),
    "cut in the table": ({"cut": 300}, "truncated"),
    "no rows": ({"tensors": [Tensor("a", (0, 2**34))]}, "'a' has a length of 0"),
    "more tensors": ({"counts": (2**63, 1)}, f"claims {2**63} tensors, and has"),
    "more keys": ({"counts": (1, 2**62)}, f"claims {2**62} metadata keys, and has"),
    "one key more": ({"counts": (1, 2)}, "a tensor's name has 5629"),
    "a long key": ({"pairs": [big(2**40)]}, "a metadata key has 1099511627776 bytes"),
    "a key that is no text": ({"pairs": [pair(b"\xff\xfe", U32, NUMBER)]}, "not valid UTF-8"),
    "a key twice": ({"pairs": [ARCHITECTURE] * 2}, "'general.architecture' stands twice"),
    "a value of no type": ({"pairs": [pair("k", 13, NUMBER)]}, "'k' has a value of type 13"),
    "no truth": ({"pairs": [pair("k", BOOL, b"\x02")]}, "'k' is 2, wanted a truth value"),
    "a long text": ({"pairs": [pair("k", STRING, big(2**50))]}, "for the value of 'k'"),
    "a long array": (
        {"pairs": [pair("k", ARRAY, struct.pack("<IQ", F32, 2**61))]},
        f"claims {2**61} items of 'k'",
    ),
    "many strings": (
        {"pairs": [pair("k", ARRAY, struct.pack("<IQ", STRING, 2**61))]},
        f"claims {2**61} strings of 'k'",
    ),
    "a long string": (
        {"pairs": [pair("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2**63))]},
        "wanted .* for strings of 'k'",
    ),
    "arrays of arrays": (
        {"pairs": [pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]},
        "'k' is an array of arrays",
    ),
    "an array of nothing": (
        {"pairs": [pair("k", ARRAY, struct.pack("<IQ", 99, 1))]},
        "'k' is an array of items of type 99",
    ),
    "alignment 0": (
        {"pairs": [ARCHITECTURE, pair("general.alignment", U32, bytes(4))]},
        "alignment is 0, wanted a power",
    ),
    "alignment 24": (
        {"pairs": [ARCHITECTURE, pair("general.alignment", U64, big(24))]},
        "alignment is 24, wanted",
    ),
    "alignment in words": (
        {"pairs": [ARCHITECTURE, pair("general.alignment", STRING, text("32"))]},
        "alignment is '32', wanted",
    ),
    "no architecture": ({"pairs": []}, "has no general.architecture"),
    "an architecture by number": (
        {"pairs": [pair("general.architecture", U32, NUMBER)]},
        "has no general.architecture",
    ),
    "no tensors": ({"tensors": []}, "has no tensors, a vocabulary at most"),
    "five dimensions": ({"tensors": [Tensor("a", (1, 1, 1, 1, 1))]}, "'a' has 5 dimensions"),
    "a type of next year": ({"tensors": [Tensor("a", code=99)]}, "'a' is of type 99, which this"),
    "a type of last year": ({"tensors": [Tensor("a", code=4)]}, "'a' is of type 4, which this"),
    "half a block": ({"tensors": [Tensor("a", (2, 16), "Q4_0")]}, "rows of 16 values, and Q4_0"),
    "a tensor twice": ({"tensors": [Tensor("a"), Tensor("a")]}, "tensor 'a' stands twice"),
    "an overlap": ({"tensors": [Tensor("a"), Tensor("b", offset=32)]}, "'b' .* overlaps what is"),
    "a hole": ({"tensors": [Tensor("a"), Tensor("b", offset=512)]}, "'b' .* is not right behind"),
    "unaligned": ({"tensors": [Tensor("a", (1, 3)), Tensor("b", offset=12)]}, "should begin at"),
    "far away": ({"tensors": [Tensor("a", offset=2**64 - 1)]}, "'a' .* is not right behind"),
    "part of none": ({"pairs": split(3, 2, 1)}, "says that it is part 3 of 2"),
    "a part of many": ({"pairs": split(0, 10**6, 1)}, "is one of 1000000 files"),
    "the second": ({"pairs": split(1, 3, 1)}, "is part 2 of 3. Name the first part, .*-00001-of-"),
    "without its name": ({"pairs": split(0, 3, 1)}, "first of 3 files, and its name does not end"),
    "too few tensors": ({"pairs": split(0, 1, 5)}, "have 1 tensors together, and it says 5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong(name: str, tmp_path: Path) -> None:
    """Each in one printable line that names the file and what to do."""
    options, words = WRONG[name]
    path = write(tmp_path / "m.gguf", **options)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"Checkpoint file {str(path)!r} cannot be used: ")
    assert message.isprintable()
    assert message.endswith(".")


@pytest.mark.parametrize("nbytes", [0, 3, 4, 7, 23, 24, 40, 70, 90, 120])
def test_a_file_that_was_cut(nbytes: int, tmp_path: Path) -> None:
    """Wherever that was, in the header or behind it."""
    path = tmp_path / "m.gguf"
    path.write_bytes(pack()[:nbytes])
    with pytest.raises(CheckpointError, match=r"truncated|not with 'GGUF'"):
        open_gguf(path)


def test_parts_that_are_missing(tmp_path: Path) -> None:
    """The names of the files that are wanted."""
    first = write_parts(tmp_path, 3)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"1 of the 3 files .* 'm-00002-of-00003\.gguf'"):
        open_gguf(first)
    many = write(tmp_path / "n-00001-of-00099.gguf", pairs=split(0, 99, 1))
    with pytest.raises(CheckpointError, match=r"98 of the 99 .* and 88 more\. Download"):
        open_gguf(many)


def test_parts_of_two_models(tmp_path: Path) -> None:
    """A part of another number, another count, or with a tensor that another has."""
    first = write_parts(tmp_path, 2)
    second = tmp_path / "m-00002-of-00002.gguf"
    write(second, [Tensor("t0")], split(1, 2, 2))
    with pytest.raises(CheckpointError, match="'t0' is in two files"):
        open_gguf(first)
    write(second, [Tensor("t1")], split(0, 2, 2))
    with pytest.raises(CheckpointError, match="that it is part 0 of 2, counted from 0"):
        open_gguf(first)
    write(second, [Tensor("t1")], [ARCHITECTURE])
    with pytest.raises(CheckpointError, match="that it is part None of None"):
        open_gguf(first)
    write(second, [Tensor("t1"), Tensor("t2")], split(1, 2, 2))
    with pytest.raises(CheckpointError, match="have 3 tensors together, and it says 2"):
        open_gguf(first)


def test_what_is_no_file(tmp_path: Path) -> None:
    """A folder, a pipe, nothing, and what may not be read."""
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_gguf(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_gguf(tmp_path / "m.gguf")


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is no fault of the file's."""
    path = write(tmp_path / "m.gguf")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(gguf_fields.Cursor, "_hold", fail)
    with pytest.raises(ReadError, match="Input/output error"):
        read_gguf(path)


def test_a_file_that_shrinks_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size was another when it was asked for."""
    path = write(tmp_path / "m.gguf")
    size = path.stat().st_size
    real = gguf_fields.Cursor

    def longer(path: Path, file: Any, _nbytes: int) -> gguf_fields.Cursor:
        return real(path, file, 10 * size)

    monkeypatch.setattr("pipeload.checkpoint.gguf.Cursor", longer)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="cut short while it was read"):
        read_gguf(path)


def test_a_header_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file's word has more read than any header has."""
    monkeypatch.setattr(gguf_fields, "MAX_HEADER_BYTES", 200)
    pairs = [pair("k", STRING, text("x" * 300))]
    with pytest.raises(CheckpointError, match="header is longer than 200 bytes, at the value of"):
        read_gguf(write(tmp_path / "m.gguf", pairs=pairs))


def test_no_memory_is_taken_on_a_files_word(tmp_path: Path) -> None:
    """Whatever it claims: a few blocks are read, no more."""
    for options, _ in WRONG.values():
        path = write(tmp_path / "m.gguf", **options)
        tracemalloc.start()
        with suppress(CheckpointError):
            open_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 << 20, options


@given(st.binary(max_size=400) | st.binary(max_size=200).map(lambda tail: pack()[:60] + tail))
def test_any_bytes_are_read_or_refused(scratch: Path, data: bytes) -> None:
    """With entries inside the file, or in words."""
    scratch.write_bytes(data)
    with suppress(CheckpointError):
        for entry in open_gguf(scratch).checkpoint.entries.values():
            assert 0 <= entry.start <= entry.stop <= len(data)


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_any_byte_that_flips(scratch: Path, place: int, value: int) -> None:
    """The same of a file that is nearly right."""
    pairs = [ARCHITECTURE, pair("t", ARRAY, strings("a", "bc")), pair("n", U32, NUMBER)]
    data = bytearray(pack([Tensor("a"), Tensor("b", (4, 256), "Q6_K")], pairs))
    data[place % len(data)] = value
    scratch.write_bytes(data)
    with suppress(CheckpointError):
        for entry in open_gguf(scratch).checkpoint.entries.values():
            assert 0 <= entry.start <= entry.stop <= len(data)
