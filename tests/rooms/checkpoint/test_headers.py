from __future__ import annotations

import json
import os
import struct
import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from pipeload.checkpoint.headers import (
    ITEM_BITS,
    Checkpoint,
    TensorEntry,
    open_checkpoint,
    read_header,
)
from pipeload.errors import CheckpointError, PipeloadError, ReadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def f32(shape: object, *offsets: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": list(offsets)}


def pack(header: object, data: bytes = b"") -> bytes:
    """The bytes of a file: `header` as it is if bytes, else as JSON."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def read_by_safetensors(content: bytes) -> dict[str, dict[str, Any]]:
    """What the format's own reader makes of a file: shape, dtype and data by name."""
    tensors = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    return dict(tensors)


def write(path: Path, header: object, data: bytes = b"") -> Path:
    path.write_bytes(pack(header, data))
    return path


def write_zeros(path: Path, *names: str) -> Path:
    """A valid file with one four-byte tensor per name."""
    header = {name: f32([1], 4 * at, 4 * at + 4) for at, name in enumerate(names)}
    return write(path, header, bytes(4 * len(names)))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all the examples of a property: each overwrites it."""
    return tmp_path_factory.mktemp("scratch") / "model.safetensors"


# Headers that are right.


def test_entries_are_absolute_ranges_of_the_file(tmp_path: Path) -> None:
    """An entry's range is where the tensor's own bytes are, for every dtype torch writes."""
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "f64": torch.randn(7, dtype=torch.float64),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    entries = read_header(path)
    raw = path.read_bytes()
    with safetensors.safe_open(path, framework="pt") as reader:
        assert set(entries) == set(reader.keys())
        for name, entry in entries.items():
            tensor = reader.get_tensor(name)
            view = reader.get_slice(name)
            assert (entry.dtype, entry.shape) == (view.get_dtype(), tuple(view.get_shape()))
            assert entry.nbytes == tensor.nbytes
            assert (
                raw[entry.start : entry.stop]
                == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            )


@pytest.mark.parametrize(
    ("header", "data"),
    [
        pytest.param({}, b"", id="no tensors"),
        pytest.param({"__metadata__": {"format": "pt"}}, b"", id="only metadata"),
        pytest.param({"__metadata__": None, "a": f32([1], 0, 4)}, bytes(4), id="null metadata"),
        pytest.param({"a": f32([0, 2**63, 2**63], 0, 0)}, b"", id="zero of very many"),
        pytest.param({"b": f32([1], 4, 8), "a": f32([1], 0, 4)}, bytes(8), id="not in file order"),
        pytest.param({"": f32([], 0, 4)}, bytes(4), id="empty name, scalar"),
        pytest.param({"a": {**f32([1], 0, 4), "more": 1.5}}, bytes(4), id="additional field"),
        pytest.param(
            b' {"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}  ', b"1", id="spaces"
        ),
    ],
)
def test_what_safetensors_reads_is_read(tmp_path: Path, header: object, data: bytes) -> None:
    """Unusual files that are valid are not refused."""
    wanted = read_by_safetensors(pack(header, data))
    got = read_header(write(tmp_path / "a.safetensors", header, data))
    assert {name: entry.shape for name, entry in got.items()} == {
        name: tuple(tensor["shape"]) for name, tensor in wanted.items()
    }


# Headers that are wrong.


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        pytest.param(b"", b"", "JSON is not valid", id="empty header"),
        pytest.param(b"\xff{}", b"", "JSON is not valid: 'utf-8'", id="not UTF-8"),
        pytest.param("{}".encode("utf-16"), b"", "JSON is not valid", id="UTF-16"),
        pytest.param(b"\xef\xbb\xbf{}", b"", "JSON is not valid", id="byte order mark"),
        pytest.param(b'{"a": nope}', b"", "JSON is not valid", id="not JSON"),
        pytest.param(b"[" * 200_000, b"", "nested too deeply", id="deep list"),
        pytest.param(b'{"a":' * 200_000, b"", "nested too deeply", id="deep object"),
        pytest.param([1, 2], b"", "header is [1, 2], not a JSON object", id="list"),
        pytest.param(b'{"a": NaN}', b"", "NaN is no JSON value", id="NaN"),
        pytest.param(b'{"a": -Infinity}', b"", "-Infinity is no JSON value", id="infinity"),
        pytest.param(b'{"a": 1%s}' % (b"0" * 9999), b"", "of 10000 digits", id="huge integer"),
        pytest.param(b'{"a":1,"a":2}', b"", "key 'a' stands twice", id="tensor twice"),
        pytest.param(b'{"a":{"dtype":"F4","dtype":"F4"}}', b"", "'dtype' stands", id="field twice"),
        pytest.param({"__metadata__": {"a": 1}}, b"", "__metadata__ must map", id="metadata int"),
        pytest.param({"__metadata__": []}, b"", "__metadata__ must map", id="metadata list"),
        pytest.param({"a": 5}, b"", "tensor 'a' must be described", id="tensor is a number"),
        pytest.param({"a": {}}, b"", "tensor 'a' has dtype None", id="no dtype"),
        pytest.param({"a": {"dtype": "F4"}}, b"", "has shape None", id="no shape"),
        pytest.param(
            {"a": {"dtype": "F4", "shape": []}}, b"", "has data_offsets None", id="no offsets"
        ),
        pytest.param({"a": {"dtype": "F31"}}, b"", "'F31', wanted one of F4, F6", id="dtype"),
        pytest.param({"a": {"dtype": ["F32"]}}, b"", "has dtype ['F32']", id="dtype is a list"),
        pytest.param({"a": f32("1", 0, 4)}, b"1234", "has shape '1'", id="shape is text"),
        pytest.param({"a": f32([True], 0, 4)}, b"1234", "has shape [True]", id="shape of bools"),
        pytest.param({"a": f32([1.0], 0, 4)}, b"1234", "has shape [1.0]", id="shape of floats"),
        pytest.param({"a": f32([-1], 0, 4)}, b"1234", "has shape [-1]", id="negative shape"),
        pytest.param({"a": f32([2**64], 0, 4)}, b"1234", "has shape [184", id="shape over 64 bits"),
        pytest.param({"a": f32([1], 0)}, b"1234", "has data_offsets [0]", id="one offset"),
        pytest.param({"a": f32([1], 0, 4, 4)}, b"1234", "has data_offsets", id="three offsets"),
        pytest.param({"a": f32([1], 4, 0)}, b"1234", "start <= stop", id="offsets swapped"),
        pytest.param({"a": f32([1], -4, 0)}, b"1234", "has data_offsets", id="negative offset"),
        pytest.param({"a": f32([1], 0, True)}, b"1234", "has data_offsets", id="offset is a bool"),
        pytest.param(
            {"a": f32([2], 0, 4)}, b"1234", "needs 8 bytes or more, its data_offsets", id="size"
        ),
        pytest.param(
            {"a": f32([2**63] * 9, 0, 4)}, b"1234", "its data_offsets [0, 4] span 4", id="overflow"
        ),
        pytest.param(
            {"a": f32([10**9] * 100_000, 0, 2**64 - 1)}, b"", "or more", id="endless product"
        ),
        pytest.param(
            {"a": {"dtype": "F6_E2M3", "shape": [3], "data_offsets": [0, 3]}},
            b"123",
            "needs 18 bits",
            id="part of a byte",
        ),
        pytest.param(
            {"a": f32([2], 0, 8), "b": f32([1], 4, 8)}, bytes(8), "'b' at bytes", id="overlap"
        ),
        pytest.param(
            {"a": f32([1], 0, 4), "b": f32([1], 0, 4)}, bytes(4), "overlaps what is", id="shared"
        ),
        pytest.param(
            {"a": f32([2], 0, 8), "b": f32([0], 4, 4)},
            bytes(8),
            "overlaps what is",
            id="zero inside",
        ),
        pytest.param({"a": f32([1], 4, 8)}, bytes(8), "leaves a hole", id="hole at the start"),
        pytest.param(
            {"a": f32([1], 0, 4), "b": f32([1], 8, 12)},
            bytes(12),
            "'b' at",
            id="hole in the middle",
        ),
        pytest.param(
            {"a": f32([1], 0, 4)},
            bytes(5),
            " bytes, but its last tensor ends at",
            id="bytes left over",
        ),
        pytest.param({}, b"1", "has 11 bytes, but its", id="bytes and no tensor"),
        pytest.param(
            {"a": f32([1], 0, 4), "b": f32([9], 4, 40)},
            bytes(7),
            "and tensor 'b' at bytes",
            id="truncated",
        ),
        pytest.param(b'{"\\ud800": {}}', b"", "'\\ud800' has a name", id="half a surrogate pair"),
        pytest.param({"a\x1b[2J\n": 5}, b"", r"tensor 'a\x1b[2J\n' must", id="control characters"),
        pytest.param({"a" * 10**6: 5}, b"", "...", id="endless name"),
        pytest.param({"a": {"dtype": "x" * 10**6}}, b"", "...", id="endless dtype"),
    ],
)
def test_a_wrong_header_is_refused(
    tmp_path: Path, header: object, data: bytes, reason: str
) -> None:
    """A malformed file is named with its tensor, what was got and wanted, in one printable line."""
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert reason in message
    assert "bad.safetensors" in message
    assert message.endswith("Download the file again.")
    assert message.isprintable()
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "truncated: got 0 bytes, wanted at least 8", id="empty"),
        pytest.param(b"1234567", "truncated: got 7 bytes", id="less than the length"),
        pytest.param(struct.pack("<Q", 9) + b"{}", "got 10 bytes, wanted 17", id="in the header"),
        pytest.param(struct.pack("<Q", 2**64 - 1), "header of 18446744073709551615", id="2**64"),
        pytest.param(struct.pack("<Q", 10**8 + 1), "100000000 is the most", id="over 100 MB"),
        pytest.param(b"version https://git-lfs", "git lfs pull", id="git lfs pointer"),
        pytest.param(b"PK\x03\x04 and so on", "zip archive", id="torch.save"),
        pytest.param(b"GGUF\x03\0\0\0\x01", "GGUF", id="gguf"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    """Other files, and what is left of an aborted download, are told apart before any parsing."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        read_header(path)


def test_a_claimed_size_is_not_allocated(tmp_path: Path) -> None:
    """A tiny file that claims a huge tensor is refused at once, whatever memory there is."""
    path = write(tmp_path / "a.safetensors", {"a": f32([2**61], 0, 2**63)}, b"1234")
    with pytest.raises(CheckpointError, match="truncated: got 109 bytes, wanted 9223372036854775"):
        read_header(path)


numbers = st.integers(0, 2**64 - 1) | st.integers(0, 200)


@given(numbers | st.none(), st.lists(numbers, max_size=5), st.tuples(numbers, numbers))
def test_no_claim_takes_memory(
    scratch: Path, length: int | None, shape: list[int], offsets: tuple[int, int]
) -> None:
    """Lengths, shapes and offsets may say what they like: what is taken follows the file's size."""
    content = pack({"a": f32(shape, *offsets)}, b"1234")
    if length is not None:
        content = struct.pack("<Q", length) + content[8:]
    scratch.write_bytes(content)
    tracemalloc.start()
    try:
        with suppress(CheckpointError):
            read_header(scratch)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < 200_000


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size seen first is not trusted either: a short read is an error."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 100) + b"{}")
    full = os.stat_result((0o100644, 0, 0, 1, 0, 0, 108, 0, 0, 0))
    monkeypatch.setattr("pipeload.checkpoint.headers.os.fstat", lambda _: full)
    with pytest.raises(CheckpointError, match="got 2 of 100 header bytes"):
        read_header(path)


def make_missing(folder: Path) -> Path:
    return folder / "absent.safetensors"


def make_below_a_file(folder: Path) -> Path:
    return write_zeros(folder / "a") / "model.safetensors"


def make_nul(folder: Path) -> Path:
    return folder / "a\0b"


def make_folder(folder: Path) -> Path:
    return folder


def make_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def make_loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


def make_long(folder: Path) -> Path:
    return folder / ("x" * 300)


@pytest.mark.parametrize(
    ("make", "kind", "reason"),
    [
        (make_missing, CheckpointError, "does not exist. Check the path"),
        (make_below_a_file, CheckpointError, "does not exist"),
        (make_nul, CheckpointError, "does not exist"),
        (make_folder, CheckpointError, "not a regular file"),
        (make_pipe, CheckpointError, "not a regular file"),
        (make_loop, ReadError, "Too many levels of symbolic links"),
        (make_long, ReadError, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, make: Callable[[Path], Path], kind: type[PipeloadError], reason: str
) -> None:
    """A missing file is the checkpoint's fault, other failures the system's; no pipe blocks."""
    with pytest.raises(kind, match=reason) as caught:
        read_header(make(tmp_path))
    assert str(caught.value).isprintable()


def test_entries_cannot_be_changed(tmp_path: Path) -> None:
    """A checkpoint is shared by threads, so nothing can write to it."""
    checkpoint = open_checkpoint([write_zeros(tmp_path / "a.safetensors", "x")])
    entries: Any = checkpoint.entries
    with pytest.raises(TypeError):
        entries["y"] = entries["x"]
    with pytest.raises(AttributeError):
        entries["x"].start = 0
    with pytest.raises(AttributeError):
        checkpoint.files = ()  # type: ignore[misc]


# Several files, and the index.


def test_shards_become_one_checkpoint(tmp_path: Path) -> None:
    """Tensors of all shards are found by name; the index may leave some out, links are fine."""
    write_zeros(tmp_path / "blob", "a", "b")
    (tmp_path / "one.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "sub").mkdir()
    two = write_zeros(tmp_path / "sub" / "one.safetensors", "c")
    files: list[str | Path] = [str(tmp_path / "one.safetensors"), two, two]
    weight_map = {"a": "one.safetensors", "c": "sub/one.safetensors"}
    checkpoint = open_checkpoint(files, weight_map)
    assert checkpoint.files == (tmp_path / "one.safetensors", two)
    assert {name: entry.file for name, entry in checkpoint.entries.items()} == {
        "a": tmp_path / "one.safetensors",
        "b": tmp_path / "one.safetensors",
        "c": two,
    }
    assert checkpoint.total_bytes == 12
    assert isinstance(checkpoint, Checkpoint)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "two.safetensors"}, "'a' is in shard 'two.safetensors', but it is in '.*one.safet"),
        ({"z": "one.safetensors"}, "'z' is in shard 'one.safetensors', but it is in none"),
        ({"a": "three.safetensors"}, "'a' is in shard 'three.safetensors', but it is in '.*one"),
        ({"z": "three.safetensors"}, "it is in none of the files"),
        ({"a": ""}, "'a' is in shard '', but"),
        ({"a": "ne.safetensors"}, "'a' is in shard 'ne.safetensors', but"),
    ],
)
def test_an_index_that_contradicts_the_shards_is_refused(
    tmp_path: Path, weight_map: dict[str, str], reason: str
) -> None:
    """Every tensor that the index lists must be in the shard that it names."""
    one = write_zeros(tmp_path / "one.safetensors", "a")
    two = write_zeros(tmp_path / "two.safetensors", "b")
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint([one, two], weight_map)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Which of two would be loaded is left to nobody: both files are named."""
    one = write_zeros(tmp_path / "one.safetensors", "a", "b")
    two = write_zeros(tmp_path / "two.safetensors", "b")
    with pytest.raises(CheckpointError, match=r"'b' is in two files, '.*one\..*' and '.*two\."):
        open_checkpoint([one, two])


def test_no_files_are_refused() -> None:
    """An empty list is a mistake, not an empty checkpoint."""
    with pytest.raises(CheckpointError, match="No checkpoint file"):
        open_checkpoint([])


# Properties.

Table = list[tuple[str, str, list[int]]]
shapes = st.lists(st.integers(0, 6), max_size=4)
tables: st.SearchStrategy[Table] = st.lists(
    st.tuples(st.text(max_size=8), st.sampled_from(sorted(ITEM_BITS)), shapes),
    max_size=6,
    unique_by=lambda row: row[0],
).map(lambda rows: [row for row in rows if row[0] != "__metadata__" and count_bits(row) % 8 == 0])


def count_bits(row: tuple[str, str, list[int]]) -> int:
    bits = ITEM_BITS[row[1]]
    for length in row[2]:
        bits *= length
    return bits


def lay_out(table: Table) -> tuple[dict[str, object], int]:
    header: dict[str, object] = {}
    end = 0
    for row in table:
        start, end = end, end + count_bits(row) // 8
        header[row[0]] = {"dtype": row[1], "shape": row[2], "data_offsets": [start, end]}
    return header, end


def assert_inside(entries: dict[str, TensorEntry], size: int) -> None:
    for entry in entries.values():
        assert 8 <= entry.start <= entry.stop <= size


@given(tables, st.randoms(use_true_random=False))
def test_valid_files_are_read_as_safetensors_reads_them(
    scratch: Path, table: Table, random: Any
) -> None:
    """Names, dtypes, shapes and bytes are those of the format's own reader, for every dtype."""
    header, size = lay_out(table)
    content = pack(dict(random.sample(sorted(header.items()), len(header))), random.randbytes(size))
    scratch.write_bytes(content)
    got = read_header(scratch)
    wanted = read_by_safetensors(content)
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        entry = got[name]
        assert (entry.name, entry.file, entry.dtype) == (name, scratch, tensor["dtype"])
        assert list(entry.shape) == tensor["shape"]
        assert content[entry.start : entry.stop] == bytes(tensor["data"])


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=4)
    | st.sampled_from(sorted(ITEM_BITS)),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=4), values),
    max_leaves=6,
)


@st.composite
def broken_files(draw: st.DrawFn) -> bytes:
    """A valid file with one field replaced, some bytes overwritten, or an end cut or added."""
    table: Table = draw(tables)
    header, size = lay_out(table)
    if draw(st.booleans()) and header:
        fields: Any = header[draw(st.sampled_from(sorted(header)))]
        fields[draw(st.sampled_from(sorted(fields)))] = draw(json_values)
    content = bytearray(pack(header, bytes(size)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(content)))
        content[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(content)


@given(st.binary(max_size=200) | st.binary(max_size=200).map(pack) | broken_files())
def test_any_bytes_give_entries_inside_the_file_or_our_own_error(
    scratch: Path, content: bytes
) -> None:
    """Whatever a file says, nothing outside it is ever promised, and no other exception leaves."""
    scratch.write_bytes(content)
    try:
        entries = read_header(scratch)
    except CheckpointError as error:
        entries, message = {}, str(error)
    else:
        message = ""
    assert message.isprintable()
    assert_inside(entries, len(content))
