from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeload.checkpoint.headers import check_folder
from pipeload.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def write_index(folder: Path, *shards: str, name: str = "model.safetensors.index.json") -> Path:
    weight_map = {f"tensor{at}": shard for at, shard in enumerate(shards)}
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))
    return path


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")


def name_weights(folder: Path, name: object) -> None:
    (folder / "config.json").write_text(json.dumps({"transformers_weights": name}))


@pytest.mark.parametrize("variant", [None, "fp16", "a.b"])
def test_single_files_and_shards_pass(tmp_path: Path, variant: str | None) -> None:
    """A folder with one file, or an index and its shards, passes; variants are named as always."""
    part = "" if variant is None else f".{variant}"
    write_index(tmp_path, "one.safetensors", name=f"model.safetensors.index{part}.json")
    touch(tmp_path, "one.safetensors", "pytorch_model.bin")
    check_folder(tmp_path, variant=variant)
    touch(tmp_path, f"model{part}.safetensors")
    (tmp_path / "one.safetensors").unlink()
    check_folder(tmp_path, variant=variant)  # the index is not looked at any more


def test_links_and_subfolders_pass(tmp_path: Path) -> None:
    """In the hub's cache every file is a link that leads out of its folder."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    touch(tmp_path, "blob")
    touch(snapshot, "sub/b.safetensors")
    (snapshot / "a.safetensors").symlink_to("../blob")
    write_index(snapshot, "./a.safetensors", "sub//b.safetensors")
    check_folder(snapshot)


def test_an_index_is_read_as_leniently_as_transformers_does(tmp_path: Path) -> None:
    """What json.loads accepts in an index is none of our business."""
    touch(tmp_path, "a.safetensors")
    text = '{"metadata":{"x":NaN,"x":1},"weight_map":{"a":"b.safetensors","a":"a.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    check_folder(tmp_path)


@pytest.mark.parametrize("files", [[], ["pytorch_model.bin"], ["adapter_model.bin"]])
def test_adapters_are_left_alone(tmp_path: Path, files: list[str]) -> None:
    """The base model of a PEFT adapter stands elsewhere and is checked there."""
    touch(tmp_path, "adapter_config.json", *files)
    check_folder(tmp_path)


def test_an_adapter_beside_a_model_changes_nothing(tmp_path: Path) -> None:
    """With a config.json the folder itself is the base model, and is checked as one."""
    touch(tmp_path, "adapter_config.json", "config.json", "adapter_model.safetensors")
    check_folder(tmp_path)
    touch(tmp_path, "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only has pickled weights"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd.safetensors",
        "../a.safetensors",
        "sub/../../a.safetensors",
        "..\\a.safetensors",
        "C:a.safetensors",
        "C:/a.safetensors",
        "\\\\host\\a.safetensors",
        ".. /a.safetensors",
        "a\0.safetensors",
        "a\n.safetensors",
        "\ud800.safetensors",
        "",
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """A shard's name is a plain relative path on every system, whatever lies there."""
    touch(tmp_path, "a.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    write_index(folder, name)
    with pytest.raises(CheckpointError, match="may lie outside the folder") as caught:
        check_folder(folder)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        pytest.param("", "JSON is not valid", id="empty"),
        pytest.param("[" * 100_000, "nested too deeply", id="deep"),
        pytest.param("[1]", r"it is \[1\], not a JSON object", id="list"),
        pytest.param("{}", "its weight_map is None", id="no weight_map"),
        pytest.param('{"weight_map": {}}', "its weight_map is {}", id="empty weight_map"),
        pytest.param('{"weight_map": ["a"]}', r"its weight_map is \['a'\]", id="list of names"),
        pytest.param('{"weight_map": {"a": 1}}', "its weight_map is {'a': 1}", id="numbers"),
        pytest.param('{"weight_map": {"a": "a"}}', "no metadata object", id="no metadata"),
        pytest.param(
            '{"metadata": {}, "weight_map": {"a": "a.bin"}}', "'a.bin', which is not", id="pickled"
        ),
        pytest.param(
            '{"metadata": {}, "weight_map": {"a": "%s.safetensors"}}' % ("a" * 999),
            "1 of its 1 shards",
            id="name too long",
        ),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, index: str, reason: str) -> None:
    """An index that cannot be used says what is wrong with it."""
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=reason) as caught:
        check_folder(tmp_path)
    assert "index.json" in str(caught.value)


def test_an_endless_index_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index has a largest size, as a header has."""
    monkeypatch.setattr("pipeload.checkpoint.untrusted_json.MAX_JSON_BYTES", 20)
    write_index(tmp_path, "a.safetensors")
    with pytest.raises(CheckpointError, match="more than 20 bytes of JSON"):
        check_folder(tmp_path)


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    """All that must be downloaded is told at once; a long list is cut."""
    write_index(tmp_path, *(f"{at:02}.safetensors" for at in range(15)))
    touch(tmp_path, "00.safetensors")
    (tmp_path / "01.safetensors").symlink_to("nowhere")
    with pytest.raises(
        CheckpointError, match=r"14 of its 15 shards are missing: '01.saf"
    ) as caught:
        check_folder(tmp_path)
    assert "'10.safetensors' and 4 more. Download them" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "a.pt", "a.PTH", "a.ckpt"]
)
def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    """Pickled files can run code: the message says so, and gives commands to paste in a shell."""
    folder = tmp_path / 'it\'s a "model"'
    folder.mkdir()
    touch(folder, name, "config.json")
    with pytest.raises(CheckpointError, match=r"can run code.*If you trust their source") as caught:
        check_folder(folder, variant="fp16")
    commands = [shlex.split(line) for line in str(caught.value).splitlines() if "python -c" in line]
    assert [command[:2] for command in commands] == [["python", "-c"]] * 2
    for _, _, code in commands:
        compile(code, "command", "exec")
        assert json.dumps(str(folder)) in code
    assert 'variant="fp16"' in commands[0][2]
    assert name in str(caught.value)


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    """The names looked for and the ones that are there stand side by side."""
    touch(tmp_path, "model.fp16.safetensors", "optimizer.pt", "training_args.bin")
    with pytest.raises(
        CheckpointError, match=r"Looked for: 'model.safetensors', 'model."
    ) as caught:
        check_folder(tmp_path)
    assert "files there: 'model.fp16.safetensors'. Check the path, pass variant=" in str(
        caught.value
    )
    with pytest.raises(CheckpointError, match="is not a folder"):
        check_folder(tmp_path / "absent")


def test_a_folder_without_files_says_none(tmp_path: Path) -> None:
    """Nothing at all is reported as such."""
    with pytest.raises(CheckpointError, match="safetensors files there: none"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("own.safetensors", None, id="file"),
        pytest.param("own.safetensors.index.json", None, id="index"),
        pytest.param("absent.safetensors", "Looked for: 'absent.safetensors'", id="missing"),
        pytest.param("../own.safetensors", "may lie outside", id="outside"),
        pytest.param("adapter_model.bin", "not a safetensors file", id="pickled"),
        pytest.param(5, "Looked for: 'model.safetensors'", id="no name"),
    ],
)
def test_the_file_that_the_configuration_names_comes_first(
    tmp_path: Path, name: object, reason: str | None
) -> None:
    """As in transformers, `transformers_weights` in config.json decides which file is loaded."""
    touch(tmp_path, "own.safetensors")
    write_index(tmp_path, "own.safetensors", name="own.safetensors.index.json")
    name_weights(tmp_path, name)
    if reason is None:
        check_folder(tmp_path)
        return
    with pytest.raises(CheckpointError, match=reason):
        check_folder(tmp_path)


def test_a_broken_configuration_is_left_to_transformers(tmp_path: Path) -> None:
    """Only the weights are judged here."""
    (tmp_path / "config.json").write_text("{")
    touch(tmp_path, "model.safetensors")
    check_folder(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda values: (
        st.lists(values, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["weight_map", "metadata"]), values)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all the examples of a property: each overwrites the index."""
    return tmp_path_factory.mktemp("scratch")


@given(st.binary(max_size=80) | json_values.map(json.dumps).map(str.encode))
def test_any_index_passes_or_gives_our_own_error(scratch: Path, content: bytes) -> None:
    """An index from anywhere cannot raise anything but a CheckpointError."""
    (scratch / "model.safetensors.index.own.json").write_bytes(content)
    with pytest.raises(CheckpointError):  # none of these lists a shard that is there
        check_folder(scratch, variant="own")


SHARD_NAMES = ["a.safetensors", "./a.safetensors", "sub/../a.safetensors", "../a.safetensors", "/a"]


@given(
    st.dictionaries(
        st.text(max_size=4),
        st.sampled_from(SHARD_NAMES) | st.text("./\\\\:a\0\x1b\u202e ", max_size=6),
        min_size=1,
        max_size=3,
    )
)
def test_whatever_an_index_names_is_inside(scratch: Path, weight_map: dict[str, str]) -> None:
    """An index passes if all its shards are files below its folder, by any way of writing them."""
    folder = scratch / "model"
    folder.mkdir(exist_ok=True)
    for place in (scratch, folder):
        (place / "a.safetensors").touch()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        check_folder(folder)
    except CheckpointError:
        return
    for name in weight_map.values():
        assert (folder / name).resolve().is_relative_to(folder.resolve())
        assert (folder / name).is_file()
