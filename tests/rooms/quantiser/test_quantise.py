"""`pipeload.quantize`: the checkpoints it makes are loaded, streamed and saved; what goes wrong."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import pipeload
from pipeload.cli.commands import app
from pipeload.errors import (
    CheckpointError,
    MemoryLimitError,
    OptionError,
    UnsupportedModelError,
)
from pipeload.formats.form_names import FORMS as METHODS
from pipeload.formats.integers import byte_product, product
from pipeload.formats.integers.format import OURS, TORCHS
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import ORDERS, kernel_order
from pipeload.formats.integers.packed_linear import PackedLinear
from pipeload.formats.integers.parted_linear import PartedLinear
from pipeload.formats.integers.rounding import to_int8
from pipeload.hf.pending_load import PendingLoad
from pipeload.quantiser.resumable_shards import MANIFEST
from tests.promises.ways_in.test_device_ways import mixture
from tests.support.children import killed_in_fork
from tests.support.exact import (
    assert_same,
    assert_streamed,
    limits,
    load,
    load_smallest,
    prompt,
    steady_floor,
    step_logits,
)
from tests.support.models import load_plain, move_data_start, save_random, tensor_files
from tests.support.sweeps import few
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import TinyCheckpoint

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

ROOT = Path(__file__).resolve().parents[3]
FORMS: dict[str, dict[str, Any]] = {
    "int8": {"method": "int8"},
    "int4 by 32": {"method": "int4", "group_size": 32},
    "int4 by 128, hqq": {"method": "int4", "group_size": 128, "zero_points": "hqq"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "qwen3": {"head_dim": 64, "tie_word_embeddings": True},
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
OTHER_ORDER = next(name for name in ORDERS if name != kernel_order())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`source(family)`: the folder of a small float checkpoint of several shards, made once."""
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
            folder = tmp_path_factory.mktemp(family)
            save_random(config, folder, torch.bfloat16, seed=5, max_shard_size="1MB")
            made[family] = folder
        return made[family]

    return checkpoint


@pytest.fixture
def llama(source: Callable[[str], Path]) -> Path:
    """The float llama."""
    return source("llama")


def outputs(model: Any) -> list[torch.Tensor]:
    """Logits of a prompt, of decoding steps, and of two sequences; and what is generated.

    And of two long prompts: so many rows go another way than few.
    """
    made = step_logits(model, prompt(), 3) + step_logits(model, prompt(2, 7), 1)
    made += step_logits(model, prompt(2, 140), 0)
    made.append(model.generate(prompt(), max_new_tokens=4, do_sample=False))
    return made


def packed(model: Any) -> dict[str, PackedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, PackedLinear)}


# -- what is made ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "form"),
    few(
        itertools.product(FAMILIES, FORMS),
        [
            (family, form)
            for number, family in enumerate(FAMILIES)
            for other, form in enumerate(FORMS)
            if number == other % len(FAMILIES) or family == "llama"
        ],
    ),
)
def test_streamed_is_plain(
    family: str, form: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    """At the smallest limit, in the middle, and where all fits; and after remove()."""
    folder = pipeload.quantize(source(family), tmp_path / "made", **FORMS[form])
    model = load_plain(folder)
    expected = outputs(model)
    assert len(packed(model)) == 7 * SIZES["num_hidden_layers"]
    for limit in limits(folder, 3):
        model = load(folder, limit)
        assert_same(outputs(model), expected, f"{form} at {limit}")
        if limit == limits(folder, 3)[0]:
            assert_streamed(model)
    model.pipeload.remove()
    assert_same(outputs(model), expected, "after remove()")


@pytest.mark.parametrize(
    ("family", "form"),  # the head of a qwen3 is the embedding
    few(
        itertools.product(["llama", "qwen3"], ["int8", "int4 by 32"]),
        [("llama", "int4 by 32"), ("qwen3", "int8")],
    ),
)
def test_an_int8_head(
    family: str,
    form: str,
    source: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the head's own floats; it streams in parts, and the embedding stays as it was."""
    monkeypatch.setattr("pipeload.quantiser.forms.PART_BYTES", 32 << 10)
    folder = pipeload.quantize(source(family), tmp_path / "made", head="int8", **FORMS[form])
    model = load_plain(folder)
    floats = load_plain(source(family))
    assert isinstance(model.lm_head, PartedLinear)
    parts = [part for part in model.lm_head.parts if isinstance(part, Int8Linear)]
    assert len(parts) == len(model.lm_head.parts) > 1
    wanted = to_int8(floats.lm_head.weight)
    assert torch.equal(torch.cat([part.weight for part in parts]), wanted.values)
    assert torch.equal(torch.cat([part.scale for part in parts]), wanted.scale)
    table = model.get_input_embeddings().weight
    assert torch.equal(table, floats.get_input_embeddings().weight)
    expected = outputs(model)
    for limit in limits(folder, 3):
        assert_same(outputs(load(folder, limit)), expected, f"{family}, {form} at {limit}")
    units = load_smallest(folder).pipeload.plan.units
    assert sum(unit.name.startswith("lm_head.parts.") for unit in units) == len(parts)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["quantization_config"]["modules"] == (
        {} if form == "int8" else {"lm_head": {"bits": 8}}
    )
    model.save_pretrained(tmp_path / "saved")
    assert_same(outputs(load_plain(tmp_path / "saved")), expected, "saved")


def test_heads_that_cannot_be(llama: Path, tmp_path: Path) -> None:
    """An option that means nothing, one that bitsandbytes has no use for, and a model without."""
    with pytest.raises(OptionError, match="head='int4' is unknown"):
        pipeload.quantize(llama, tmp_path / "made", head="int4")
    with pytest.raises(OptionError, match="head='int8' is of int4 and int8"):
        pipeload.quantize(llama, tmp_path / "made", method="nf4", head="int8")
    config = AutoConfig.for_model("llama", **(SIZES | {"hidden_size": 232, "head_dim": 32}))
    save_random(config, tmp_path / "odd", torch.bfloat16, seed=1)
    with pytest.raises(UnsupportedModelError, match="no output head that could be int8"):
        pipeload.quantize(tmp_path / "odd", tmp_path / "made", head="int8")


def test_a_head_that_is_stored_beside_the_embedding(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where both are one: the library ties them if they are equal, which is not known."""
    folder = tmp_path / "both"
    shutil.copytree(source("qwen3"), folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = index["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(folder / name)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, folder / name, {"format": "pt"})
    index["weight_map"]["lm_head.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError, match="is stored beside it all the same"):
        pipeload.quantize(folder, tmp_path / "made", head="int8")
    assert not (tmp_path / "made").exists()


def test_a_head_that_is_no_float(
    source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the library would make up, or convert, cannot be read from the checkpoint."""
    monkeypatch.setattr(PendingLoad, "plain_parameters", lambda _self: {})
    with pytest.raises(UnsupportedModelError, match="is no float tensor"):
        pipeload.quantize(source("llama"), tmp_path / "made", head="int8")


@pytest.mark.parametrize("form", FORMS)
def test_products_are_near_the_floats(form: str, llama: Path, tmp_path: Path) -> None:
    """Module by module, on the same input: nothing is transposed, swapped or forgotten."""
    model = load_plain(pipeload.quantize(llama, tmp_path / "made", **FORMS[form]))
    floats = load_plain(llama)
    bound = 0.015 if form == "int8" else 0.13
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    for path, module in packed(model).items():
        wide = torch.cat((x, x.flip(1)), 1)[:, : module.in_features]
        with torch.no_grad():
            got, wanted = module(wide).float(), floats.get_submodule(path)(wide).float()
        assert (got - wanted).norm() < bound * wanted.norm(), path
        assert not torch.equal(got, wanted), path
    kept = dict(floats.named_parameters())
    for name, parameter in model.named_parameters():
        if name in kept and parameter.is_floating_point():
            assert torch.equal(parameter, kept[name]), name


@pytest.mark.slow
def test_the_real_model(smollm2_bf16: Path, tmp_path: Path) -> None:
    """SmolLM2: the next word of int8 is that of bf16, and so is most of what follows."""
    folder = pipeload.quantize(smollm2_bf16, tmp_path / "made")
    model = load_smallest(folder)
    text = torch.tensor([[504, 3575, 282, 4649, 314]])  # The capital of France is
    with torch.no_grad():
        wanted = load_plain(smollm2_bf16)(text).logits.float().softmax(-1)
        got = model(text).logits.float().softmax(-1)
    assert torch.equal(got[0, -1].argmax(), wanted[0, -1].argmax())
    assert (got - wanted).abs().sum(-1).max() < 0.2


@pytest.mark.parametrize("form", ["int8", "int4 by 32"])
def test_saved_and_loaded_again(form: str, llama: Path, tmp_path: Path) -> None:
    """By the library alone; a streamed model that was removed as well."""
    folder = pipeload.quantize(llama, tmp_path / "made", **FORMS[form])
    expected = outputs(load_plain(folder))
    load_plain(folder).save_pretrained(tmp_path / "again")
    assert_same(outputs(load_plain(tmp_path / "again")), expected)
    streamed = load_smallest(folder)
    streamed.pipeload.remove()
    streamed.save_pretrained(tmp_path / "removed")
    assert_same(outputs(load_plain(tmp_path / "removed")), expected)


def made_in(order: str, llama: Path, target: Path) -> Path:
    """int4 in an order of torch's kernel, as earlier versions made it."""
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr("pipeload.quantiser.forms.BY_ROWS", order)
        return pipeload.quantize(llama, target, **FORMS["int4 by 32"])


def test_exact_inputs(llama: Path, tmp_path: Path) -> None:
    """What torch's kernel makes of the same weights in its own order, streamed and plain."""
    folder = pipeload.quantize(llama, tmp_path / "rows", **FORMS["int4 by 32"])
    own = made_in(kernel_order(), llama, tmp_path / "own")
    expected = outputs(load_plain(own))
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["exact_inputs"] = True
    plain = load_plain(folder, config=config)
    assert_same(outputs(plain), expected, "plain")
    for limit in limits(folder, 3, exact_inputs=True):
        model = load(folder, limit, exact_inputs=True)
        assert_same(outputs(model), expected, f"at {limit}")
        assert model.pipeload.plan.kernel == TORCHS.format("int4")
    model.pipeload.remove()
    model.save_pretrained(tmp_path / "saved")
    assert_same(outputs(load_plain(tmp_path / "saved")), expected, "saved")
    rounded = load_smallest(folder)
    ours = rounded.pipeload.plan.kernel == OURS.format("int4")
    assert ours == (product.compiled() is not None)
    assert ours == any(
        not torch.equal(*pair) for pair in zip(outputs(rounded), expected, strict=True)
    )


def test_exact_inputs_of_int8(llama: Path, tmp_path: Path) -> None:
    """Of a head beside int4, too: torch's kernels, streamed and plain, and other bits than ours."""
    folder = pipeload.quantize(llama, tmp_path / "made", head="int8", **FORMS["int4 by 32"])
    exact = load_smallest(folder, exact_inputs=True)
    assert exact.pipeload.plan.kernel == "; ".join(map(TORCHS.format, ("int4", "int8")))
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["exact_inputs"] = True
    plain = load_plain(folder, config=config)
    assert_same(outputs(exact), outputs(plain))
    assert isinstance(plain.lm_head, Int8Linear)
    assert plain.lm_head.exact_inputs
    x = torch.randn(3, plain.lm_head.in_features).to(torch.bfloat16)
    plain.lm_head.exact_inputs = False
    rounded = plain.lm_head(x)
    plain.lm_head.exact_inputs = True
    assert torch.equal(plain.lm_head(x), rounded) == (byte_product.compiled() is None)


def test_made_on_another_processor(llama: Path, tmp_path: Path) -> None:
    """Int4 rows lie in another order there: put right at load, as they stream, and when saved."""
    own = made_in(kernel_order(), llama, tmp_path / "own")
    other = made_in(OTHER_ORDER, llama, tmp_path / "other")
    name = "model.layers.1.mlp.up_proj.weight"
    stored = [load_file(folder / "model.safetensors")[name] for folder in (own, other)]
    assert not torch.equal(*stored)
    expected = outputs(load_plain(own))
    assert_same(outputs(load_plain(other)), expected, "plain")
    for limit in limits(other, 3):
        model = load(other, limit)
        assert_same(outputs(model), expected, f"at {limit}")
    model = load_smallest(other)
    model.pipeload.remove()
    assert_same(outputs(model), expected, "after remove()")
    model.save_pretrained(tmp_path / "saved")
    assert_same(outputs(load_plain(tmp_path / "saved")), expected, "saved")


@pytest.mark.parametrize(
    ("form", "start"),
    few(itertools.product(["int8", "int4 by 32"], [2, 8]), [("int8", 2), ("int4 by 32", 8)]),
)
def test_weights_anywhere_in_a_file(form: str, start: int, llama: Path, tmp_path: Path) -> None:
    """Other writers than ours do not align them, and a kernel may need that."""
    folder = pipeload.quantize(llama, tmp_path / "made", **FORMS[form])
    expected = outputs(load_plain(folder))
    for file in folder.glob("*.safetensors"):
        move_data_start(file, start)
    assert_same(outputs(load_plain(folder)), expected, "plain")
    for limit in limits(folder, 3):
        model = load(folder, limit)
        assert_same(outputs(model), expected, f"at {limit}")
    model.pipeload.remove()
    assert_same(outputs(model), expected, "after remove()")


def test_an_evicted_module_refuses(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers have no NaN: a module called by itself must not compute with what is not there."""
    monkeypatch.setattr("pipeload.entry.loading.probe_usage", lambda _model: None)  # whole blocks
    for form, kind in (("int8", Int8Linear), ("int4 by 32", Int4Linear)):
        model = load_smallest(pipeload.quantize(llama, tmp_path / form, **FORMS[form]))
        expected = step_logits(model, prompt(), 1)
        module = model.model.layers[2].mlp.up_proj
        assert isinstance(module, kind)
        with pytest.raises(UnsupportedModelError, match=r"layers\.2\.mlp\.up_proj"):
            module(torch.ones(1, 256, dtype=torch.bfloat16))
        assert_same(step_logits(model, prompt(), 1), expected)


def test_packed_bytes_are_what_is_read(llama: Path, tmp_path: Path) -> None:
    """int4 by 32 in bf16: 4 bits a weight, and 32 for each 32 of them."""
    folder = pipeload.quantize(llama, tmp_path / "made", **FORMS["int4 by 32"])
    model = load_smallest(folder)
    weights = sum(m.in_features * m.out_features for m in packed(model).values())
    head = 2 * 512 * 256
    assert 0 < model.pipeload.plan.bytes_per_pass - head < weights * 5 / 8 * 1.1


def test_shards_are_bounded(llama: Path, tmp_path: Path) -> None:
    """Named as the library names them, with an index; the same tensors as in one file."""
    (one,) = pipeload.quantize(llama, tmp_path / "one").glob("*.safetensors")
    many = pipeload.quantize(llama, tmp_path / "many", max_shard_size="300KB")
    shards = sorted(many.glob("*.safetensors"))
    assert len(shards) > 3
    assert max(shard.stat().st_size for shard in shards) < 320_000
    assert set(tensor_files(many).values()) == {shard.name for shard in shards}
    found = {name: t for shard in shards for name, t in load_file(shard).items()}
    wanted = load_file(one)
    assert found.keys() == wanted.keys() == tensor_files(many).keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_little_memory_makes_the_same(llama: Path, tmp_path: Path) -> None:
    """In pieces of rows; a limit too small says which one is not."""
    for form in ("int8", "int4 by 32"):
        with pytest.raises(MemoryLimitError) as refusal:
            pipeload.quantize(llama, tmp_path / "none", memory_limit=1, **FORMS[form])
        least = (refusal.value.smallest_limit or 0) + 30_000_000  # this process may grow
        small = pipeload.quantize(llama, tmp_path / f"s {form}", memory_limit=least, **FORMS[form])
        roomy = pipeload.quantize(llama, tmp_path / f"r {form}", **FORMS[form])
        assert (small / "model.safetensors").read_bytes() == (
            roomy / "model.safetensors"
        ).read_bytes()
    assert not (tmp_path / "none").exists()


def test_what_else_is_in_the_folder(llama: Path, tmp_path: Path) -> None:
    """Tokenizer and generation config; a card; not the source's own card, nor its index."""
    copy = Path(shutil.copytree(llama, tmp_path / "source"))
    for name in ("tokenizer.json", "chat_template.jinja", "README.md", "LICENSE.txt", "notes.bin"):
        (copy / name).write_text(f"{name} of the source")
    folder = pipeload.quantize(copy, tmp_path / "made", **FORMS["int4 by 32"])
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE.txt", "generation_config.json"):
        assert (folder / name).read_bytes() == (copy / name).read_bytes()
    names = {file.name for file in folder.iterdir()}
    assert names.isdisjoint({"notes.bin", MANIFEST, "model.safetensors.index.json"})
    card = (folder / "README.md").read_text()
    assert all(words in card for words in ("groups of 32", "`source`", "lm_head", "squared error"))
    assert str(tmp_path) not in card


# -- kills and full disks --------------------------------------------------------------------------

fork = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@fork
def test_a_killed_run_goes_on(llama: Path, tmp_path: Path) -> None:
    """Nothing has the final name; finished shards stay as they are, and the result is the same."""
    target, partial = tmp_path / "made", tmp_path / ".made.partial"

    def progress(_done: int, _total: int) -> None:
        if len(list(partial.glob("*.safetensors"))) == 2 and list(partial.glob("*.part")):
            os.kill(os.getpid(), signal.SIGKILL)

    killed_in_fork(
        lambda: pipeload.quantize(llama, target, max_shard_size="300KB", progress=progress)
    )
    assert not target.exists()
    finished = {file.name: file.stat() for file in partial.glob("*.safetensors")}
    assert len(finished) == 2
    assert list(partial.glob("*.part"))
    pipeload.quantize(llama, target, max_shard_size="300KB")
    assert not partial.exists()
    assert not list(target.glob("*.part"))
    for name, stat in finished.items():
        now = (target / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    fresh = pipeload.quantize(llama, tmp_path / "fresh", max_shard_size="300KB")
    for file in fresh.glob("*.safetensors*"):
        assert (target / file.name).read_bytes() == file.read_bytes()


@fork
@pytest.mark.parametrize("place", ["begun", "another request", "opened", "named"])
def test_killed_between_two_files(place: str, llama: Path, tmp_path: Path) -> None:
    """At its very beginning, while another request's files go, or at its very end."""
    target, partial = tmp_path / "made", tmp_path / ".made.partial"

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(done: int, total: int) -> None:
        assert done < total / 2

    def make() -> None:
        size = "300KB"
        if place == "another request":
            with contextlib.suppress(AssertionError):
                pipeload.quantize(llama, target, progress=stop, max_shard_size=size)
            size = "200KB"
        calls = {"begun": "replace", "another request": "unlink", "opened": "rmdir"}
        setattr(Path, calls.get(place, "rename"), die)
        pipeload.quantize(llama, target, max_shard_size=size)

    killed_in_fork(make)
    assert partial.exists()
    assert not target.exists()
    pipeload.quantize(llama, target, max_shard_size="300KB")
    fresh = pipeload.quantize(llama, tmp_path / "fresh", max_shard_size="300KB")
    assert {file.name for file in target.iterdir()} == {file.name for file in fresh.iterdir()}
    assert not partial.exists()


class Full:
    """A disk that is full at the third file, until it is not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self._files = True, 0
        self._fsync = os.fsync
        monkeypatch.setattr("pipeload.quantiser.resumable_shards.os.fsync", self)

    def __call__(self, descriptor: int) -> None:
        self._files += 1
        if self.full and self._files == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(descriptor)


def test_a_full_disk(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error that says what to do, no half checkpoint; with room it goes on."""
    disk = Full(monkeypatch)
    target, partial = tmp_path / "made", tmp_path / ".made.partial"
    with pytest.raises(OptionError, match=r"disk is full.*run the same command again"):
        pipeload.quantize(llama, target, max_shard_size="300KB")
    assert not target.exists()
    assert len(list(partial.glob("*.safetensors"))) == 2
    assert not list(partial.glob("*.part"))
    disk.full = False
    pipeload.quantize(llama, target, max_shard_size="300KB")
    assert step_logits(load_plain(target), prompt(), 1)


def test_a_disk_without_room(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is computed."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(
        "pipeload.quantiser.resumable_shards.shutil.disk_usage", lambda _path: usage
    )
    with pytest.raises(OptionError, match=r"has 1\.00 kB free"):
        pipeload.quantize(llama, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_another_request_starts_anew(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of what was asked for before are not taken for those of now."""
    Full(monkeypatch)
    with pytest.raises(OptionError):
        pipeload.quantize(llama, tmp_path / "made", max_shard_size="300KB")
    options = FORMS["int4 by 32"]
    made = pipeload.quantize(llama, tmp_path / "made", max_shard_size="300KB", **options)
    fresh = pipeload.quantize(llama, tmp_path / "fresh", max_shard_size="300KB", **options)
    assert {f.name for f in made.iterdir()} == {f.name for f in fresh.iterdir()}
    for file in fresh.glob("*.safetensors"):
        assert (made / file.name).read_bytes() == file.read_bytes()


def test_another_version_starts_anew(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may round otherwise: no folder is made by two."""
    Full(monkeypatch)
    with pytest.raises(OptionError):
        pipeload.quantize(llama, tmp_path / "made", max_shard_size="300KB")
    shard = min((tmp_path / ".made.partial").glob("*.safetensors"))
    shard.write_bytes(bytes(shard.stat().st_size))
    version = metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "9" if name == "pipeload" else version(name)
    )
    made = pipeload.quantize(llama, tmp_path / "made", max_shard_size="300KB")
    assert any((made / shard.name).read_bytes())


HELD = """
import sys, time
from pathlib import Path
import pipeload
source, target = map(Path, sys.argv[1:])
def progress(done, total):
    print(flush=True)
    sys.stdin.read()
pipeload.quantize(source, target, progress=progress)
"""


@pytest.mark.slow
def test_two_at_once(llama: Path, tmp_path: Path) -> None:
    """The second is refused and changes nothing; the first finishes; nothing is left locked."""
    target = tmp_path / "made"
    first = subprocess.Popen(
        [*warm_python(), "-c", HELD, str(llama), str(target)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"\n"  # it is within a shard
        for options in ({}, FORMS["int4 by 32"]):  # the same, and another
            with pytest.raises(OptionError, match="another process is making"):
                pipeload.quantize(llama, target, **options)
        first.communicate()
    assert first.returncode == 0
    fresh = pipeload.quantize(llama, tmp_path / "fresh")
    assert {f.name for f in target.iterdir()} == {f.name for f in fresh.iterdir()}
    assert (target / "model.safetensors").read_bytes() == (fresh / "model.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"made", "fresh"}


def test_a_failure_lets_go(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its error, and with it all that it had, is still held."""
    disk = Full(monkeypatch)
    with pytest.raises(OptionError, match="disk is full") as held:
        pipeload.quantize(llama, tmp_path / "made", max_shard_size="300KB")
    disk.full = False
    assert held.value.__traceback__ is not None
    assert pipeload.quantize(llama, tmp_path / "made", max_shard_size="300KB").exists()


def test_folders_that_are_somebody_elses(llama: Path, tmp_path: Path) -> None:
    """Neither the target nor the place beside it is written over."""
    (tmp_path / "made").mkdir()
    with pytest.raises(OptionError, match="is there already"):
        pipeload.quantize(llama, tmp_path / "made")
    (tmp_path / ".other.partial").mkdir()
    (tmp_path / ".other.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(OptionError, match="holds something else"):
        pipeload.quantize(llama, tmp_path / "other")
    assert (tmp_path / ".other.partial" / "thesis.txt").exists()


# -- bad sources and bad checkpoints ---------------------------------------------------------------


def test_what_cannot_be_quantised(llama: Path, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Each is named, and nothing is left behind."""
    made = pipeload.quantize(llama, tmp_path / "made")
    with pytest.raises(UnsupportedModelError, match="quantised already, by 'pipeload'"):
        pipeload.quantize(made, tmp_path / "twice")
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has nothing"):
        pipeload.quantize(tiny("gpt2"), tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*\(96, 96\).*columns of 64"):
        pipeload.quantize(tiny("llama"), tmp_path / "llama", method="int4", group_size=64)
    with pytest.raises(CheckpointError):
        pipeload.quantize(tmp_path, tmp_path / "nothing")
    for options in ({"method": "int3"}, {"group_size": 48}, {"zero_points": "x"}):
        with pytest.raises(OptionError, match=next(iter(options))):
            pipeload.quantize(llama, tmp_path / "bad", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


OF_OTHERS: dict[str, dict[str, Any]] = {
    "group_size": {"group_size": 32},
    "zero_points": {"zero_points": "rtn"},
    "double_quant": {"double_quant": True},
    "calibrate": {"calibrate": "builtin"},
}
METHODS_OF = {
    "group_size": {"int4"},
    "zero_points": {"int4"},
    "double_quant": {"nf4", "fp4"},
    "calibrate": {"int8", "int4"},
}


@pytest.mark.parametrize("option", OF_OTHERS)
@pytest.mark.parametrize("method", METHODS)
def test_every_option_changes_something(
    method: str, option: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is another method's is refused with the reason, also as its default."""
    monkeypatch.setattr(
        "pipeload.quantiser.quantise._open", lambda *_: pytest.fail("looked at the source")
    )
    if method in METHODS_OF[option]:
        with pytest.raises(pytest.fail.Exception, match="looked at"):
            pipeload.quantize(llama, tmp_path / "made", method=method, **OF_OTHERS[option])
        return
    with pytest.raises(OptionError, match=rf"{option}=.* is of .*method='{method}'. Leave it out"):
        pipeload.quantize(llama, tmp_path / "made", method=method, **OF_OTHERS[option])


def test_experts_that_stay_floats_are_said(tmp_path: Path) -> None:
    """In the last line, in JSON, in the model card, and as a warning where they are most of it."""
    config = mixture("mixtral")
    config.intermediate_size = 104  # no multiple of 16, so no kernel takes it
    source = save_random(config, tmp_path / "source", "bf16", seed=3)
    runner = CliRunner()
    words = ["quantize", f"{source}/", str(tmp_path / "made")]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "experts" in done.stdout
    share = re.search(r"(\d+)% of the weights \(", done.stdout)
    assert share is not None
    assert int(share[1]) > 50
    assert f"{share[0]}" in done.stderr
    card = (tmp_path / "made" / "README.md").read_text()
    assert f"| Kept as floats | {share[0]}" in card
    assert "base_model" not in card  # a folder is none, whatever stands at its end
    assert "`source`" in card
    again = runner.invoke(app, [*words[:2], str(tmp_path / "again"), "--json"])
    assert round(json.loads(again.stdout)["float_share"] * 100) == int(share[1])
    assert again.stderr == ""


def test_values_that_are_no_numbers(llama: Path, tmp_path: Path) -> None:
    """The tensor is named; half a checkpoint does not get the name."""
    copy = Path(shutil.copytree(llama, tmp_path / "source"))
    name = "model.layers.2.mlp.up_proj.weight"
    file = copy / tensor_files(copy)[name]
    tensors = load_file(file)
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj.*not finite"):
        pipeload.quantize(copy, tmp_path / "made")
    assert not (tmp_path / "made").exists()


BAD: dict[str, Any] = {
    "no weight": (lambda t, n: t.pop(n), "is not in"),
    "no scale": (lambda t, n: t.pop(n.replace("weight", "scale")), "is not in"),
    "another shape": (lambda t, n: t.update({n: t[n][:64].clone()}), r"is \[64, 256\]"),
    "floats": (lambda t, n: t.update({n: t[n].float()}), "of F32"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_checkpoints(kind: str, llama: Path, tmp_path: Path) -> None:
    """One error that names the weight, before anything is computed."""
    change, words = BAD[kind]
    folder = pipeload.quantize(llama, tmp_path / "made")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors, "model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words) as refusal:
        pipeload.from_pretrained(folder, memory_limit="100GB")
    assert "layers.1.mlp.up_proj" in str(refusal.value)


@pytest.mark.parametrize(
    "change", [{"bits": 3}, {"order": "spiral", "bits": 4}, {"group_size": 5, "bits": 4}]
)
def test_bad_configurations(change: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    """A later version may know more: this one says what it does not know."""
    folder = pipeload.quantize(llama, tmp_path / "made", **FORMS["int4 by 32"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match=next(iter(change))):
        AutoModelForCausalLM.from_pretrained(folder)


# -- registration and the command ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    few(
        ["import pipeload, transformers", "import transformers, pipeload"],
        ["import transformers, pipeload"],
    ),
)
def test_plain_loading_after_the_import(first: str, llama: Path, tmp_path: Path) -> None:
    """In either order, `import pipeload` is all that the library needs to load one."""
    folder = pipeload.quantize(llama, tmp_path / "made")
    code = (
        f"{first}\nmodel = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        "print(type(model.model.layers[0].mlp.up_proj).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["Int8Linear"]


def test_the_command(llama: Path, tmp_path: Path) -> None:
    """A line or JSON on stdout; errors are one line and status 1."""
    arguments = ["quantize", str(llama), "--method", "int4", "--group-size", "128"]
    runner = CliRunner()
    done = runner.invoke(app, [*arguments, str(tmp_path / "made"), "--memory-limit", "50GB"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{tmp_path / 'made'}: ")
    again = runner.invoke(app, [*arguments, str(tmp_path / "again"), "--json"])
    assert json.loads(again.stdout)["bytes"] == (
        (tmp_path / "again" / "model.safetensors").stat().st_size
    )
    refused = runner.invoke(app, [*arguments, str(tmp_path / "made")])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "is there already" in refused.stderr
    bad = runner.invoke(app, ["quantize", str(llama), str(tmp_path / "x"), "--group-size", "7"])
    assert "group_size=7" in bad.stderr
