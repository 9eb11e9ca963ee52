"""Errors that need a rare disk, machine or checkpoint, each raised where it is made.

`pytest --every-error` lists those that neither this file nor any other raises.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.quantizers import auto as quantizers
from transformers.quantizers.base import HfQuantizer

import pipeload
from pipeload.bench import measure
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.io_mode import resolve_io_mode
from pipeload.cli import plan
from pipeload.engine import row_products
from pipeload.entry import wrap
from pipeload.entry.everywhere import stream_when_imported
from pipeload.errors import (
    CheckpointChangedError,
    CheckpointError,
    MemoryLimitError,
    OptionError,
    PipeloadError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from pipeload.formats.bitsandbytes import tiles
from pipeload.formats.integers import order
from pipeload.formats.integers.format import METHOD
from pipeload.formats.integers.quantizer import PipeloadConfig, PipeloadQuantizer
from pipeload.hf import takeover
from pipeload.quantiser.folder import check_result
from pipeload.weights.row_cuts import RowRange
from pipeload.weights.whole_shape import WholeShape
from tests.support.commands import invoke, save_tokenizer
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.support.models import load_plain, save_random, tiny_config
from tests.support.platforms import hide_proc
from tests.support.streaming import load_streamed, logits, prefetcher_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama of one file, with a tokenizer."""
    folder = tmp_path_factory.mktemp("floats")
    save_random("llama", folder, "bf16", seed=3)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def packed(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in int8."""
    return pipeload.quantize(floats, tmp_path_factory.mktemp("packed") / "int8")


# -- models and how they are loaded ----------------------------------------------------------------


class HollowConfig(PreTrainedConfig):
    model_type = "hollow"


class HollowModel(PreTrainedModel):
    """One whose weights never come from the checkpoint."""

    config_class = HollowConfig

    @classmethod
    def from_pretrained(cls, *_args: Any, **_kwargs: Any) -> Any:
        return cls(HollowConfig())


@pytest.fixture
def hollow(floats: Path, tmp_path: Path) -> Iterator[Path]:
    """The folder of such a model."""
    folder = shutil.copytree(floats, tmp_path / "hollow")
    (folder / "config.json").write_text('{"model_type": "hollow"}')
    AutoConfig.register("hollow", HollowConfig)
    AutoModelForCausalLM.register(HollowConfig, HollowModel)
    yield folder
    transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content.pop("hollow")
    AutoModelForCausalLM._model_mapping._extra_content.pop(HollowConfig)


def test_a_model_that_loads_no_weights(hollow: Path, tmp_path: Path) -> None:
    """There is nothing to quantise or to convert, nor to measure."""
    for make in (pipeload.quantize, pipeload.convert):
        with pytest.raises(CheckpointError, match="holds no weights"):
            make(hollow, tmp_path / "target")
    (tmp_path / "text").write_text("w3 w4 w5")
    assert "has no weights" in invoke("eval", hollow, "--text", tmp_path / "text").stderr


def test_nothing_to_stream_and_no_room(tmp_path: Path) -> None:
    """Inside `streaming`, what has no blocks is loaded as a whole, if it fits."""
    config = tiny_config("llama", num_hidden_layers=0)
    save_random(config, tmp_path, torch.bfloat16, seed=1)
    with (
        pipeload.streaming(memory_limit="1MB"),
        pytest.raises(MemoryLimitError, match="nothing that could be streamed") as refusal,
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert refusal.value.smallest_limit > 1_000_000


def test_weights_that_are_no_files(floats: Path) -> None:
    """Given to the library in a way that only its loader sees."""
    config = AutoConfig.from_pretrained(floats)
    weights = load_plain(floats).state_dict()
    load = transformers.LlamaForCausalLM.from_pretrained
    with pytest.raises(OptionError, match="state_dict= cannot be streamed"):
        takeover.peek(lambda: load(None, config=config, state_dict=weights))


def test_pickled_weights_that_only_the_library_finds(floats: Path, tmp_path: Path) -> None:
    """As with a hub id: refused before they are opened."""
    shutil.copy(floats / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match="is a pickled checkpoint"):
        takeover.peek(lambda: AutoModelForCausalLM.from_pretrained(tmp_path))


class OwnConfig(transformers.utils.quantization_config.QuantizationConfigMixin):
    """A method that its user has added to the library."""

    def __init__(self) -> None:
        self.quant_method: Any = "own"
        self.modules_to_not_convert: list[str] = []


class OwnQuantizer(HfQuantizer):
    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def test_a_method_that_the_user_has_added(floats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It quantises while it loads, as the library's own do."""
    monkeypatch.setitem(quantizers.AUTO_QUANTIZATION_CONFIG_MAPPING, "own", OwnConfig)
    monkeypatch.setitem(quantizers.AUTO_QUANTIZER_MAPPING, "own", OwnQuantizer)
    with pytest.raises(UnsupportedModelError, match="for 'own' quantises weights"):
        pipeload.from_pretrained(floats, quantization_config=OwnConfig())


def test_a_library_that_does_not_unpack() -> None:
    """An older one loads fp8 for its kernels only."""
    with pytest.raises(UnsupportedModelError, match="does not unpack them while it loads"):
        takeover._check_unpacks({"quant_method": "fp8"}, [])


def test_wrapping_a_quantised_model(packed: Path) -> None:
    """Its floats are gone."""
    model = AutoModelForCausalLM.from_pretrained(packed)
    with pytest.raises(UnsupportedModelError, match="only float weights can be wrapped"):
        pipeload.wrap(model)


def test_wrapping_a_model_on_an_accelerator() -> None:
    """As far as a machine without one can tell."""

    class Elsewhere(nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[Any]:
            yield SimpleNamespace(device=torch.device("cuda", int(recurse)))

    with pytest.raises(OptionError, match="has weights on cuda"):
        wrap._refuse(Elsewhere())


def test_an_unknown_pressure(floats: Path) -> None:
    """The option has two values."""
    with pytest.raises(OptionError, match="pressure='high' is unknown"):
        pipeload.from_pretrained(floats, memory_limit="100GB", pressure="high")


def test_exact_inputs_that_mean_nothing(floats: Path) -> None:
    """No model but int4 by rows has others; and it is yes or no."""
    with pytest.raises(OptionError, match=r"exact_inputs=True, and no .* is packed in a form"):
        pipeload.from_pretrained(floats, memory_limit="100GB", exact_inputs=True)
    with pytest.raises(OptionError, match="exact_inputs='perhaps' means nothing"):
        pipeload.plan(floats, exact_inputs="perhaps")  # type: ignore[arg-type]
    with pipeload.streaming(memory_limit="100GB", exact_inputs=True):  # where models may be many
        assert load_plain(floats).pipeload.plan.kernel is None


def test_exact_inputs_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are none there; the message says what to give instead."""
    before = PreTrainedModel.from_pretrained
    monkeypatch.setenv("PIPELOAD_EXACT_INPUTS", "True")
    cure = r"variable PIPELOAD_EXACT_INPUTS: exact_inputs='True' .* in the environment, 1 or 0\."
    with pytest.raises(OptionError, match=cure):
        stream_when_imported("100GB")
    assert PreTrainedModel.from_pretrained == before


def test_a_limit_in_the_environment(floats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says where the limit comes from."""
    before = PreTrainedModel.from_pretrained
    monkeypatch.setenv("PIPELOAD_PRESSURE", "high")
    with pytest.raises(OptionError, match=r"variable PIPELOAD_PRESSURE: pressure='high' is"):
        stream_when_imported("4GB")
    assert PreTrainedModel.from_pretrained == before
    monkeypatch.setenv("PIPELOAD_MEMORY_LIMIT", "lots")
    with pytest.raises(OptionError, match=r"variable PIPELOAD_MEMORY_LIMIT: .*'lots'"):
        pipeload.plan(floats)


# -- life ------------------------------------------------------------------------------------------


def test_a_limit_after_the_end(tiny: TinyCheckpoint) -> None:
    """A plain model has none."""
    model = load_streamed(tiny("llama"))
    handle = model.pipeload
    handle.remove()
    with pytest.raises(UnsupportedOperationError, match="after remove"):
        handle.set_memory_limit("3GB")


def test_another_process(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a forked child finds it; the model goes on in its own process."""
    model = load_streamed(tiny("llama"))
    expected = logits(model)
    with monkeypatch.context() as patch:
        patch.setattr(prefetcher_of(model), "_pid", os.getpid() + 1)
        with pytest.raises(UnsupportedOperationError, match="forked"):
            model.pipeload.remove()
    assert torch.equal(logits(model), expected)


def test_ranges_that_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that sets memory aside for zeros, and kernels that sum ranges of rows otherwise."""
    monkeypatch.setattr(row_products, "ranges_are_exact", lambda *_: False)
    monkeypatch.setattr(WholeShape, "is_free", lambda: False)
    source = SimpleNamespace(start=0)
    weight = SimpleNamespace(name="up.weight", shape=(8, 8), raw=True, sources=(source,))
    products = row_products.RowProducts(cast("Any", weight), [RowRange(0, 8)])
    with pytest.raises(UnsupportedOperationError, match=r"'up\.weight'.*shape \(3, 8\)"):
        products.by_whole(nn.Linear(8, 8), torch.ones(3, 8), torch.float32)


def test_memory_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither through /proc nor through psutil."""
    from pipeload.system import memory

    def refuse() -> Any:
        raise PermissionError("hidden")

    monkeypatch.setattr("pipeload.system.memory.psutil.Process", refuse)
    with pytest.raises(UnsupportedOperationError, match=r"cannot be measured.*hidden"):
        memory._memory_info()


# -- files -----------------------------------------------------------------------------------------


def test_a_file_that_is_gone_where_there_is_no_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing there opens the file that was opened before."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(8192))
    files = FileSet([file], "buffered")
    hide_proc(monkeypatch)
    assert files.reopen_name(file) == str(file)
    file.unlink()
    with pytest.raises(CheckpointChangedError, match="replaced or removed"):
        files.reopen_name(file)
    files.close()


@pytest.mark.parametrize(
    ("mode", "message"), [("fast", "is unknown"), ("direct", "io_mode='direct' does not work")]
)
def test_modes_of_reading(mode: str, message: str, tmp_path: Path) -> None:
    """A name that is none, and a file that cannot be read past the cache: it is a folder."""
    with pytest.raises(OptionError, match=message):
        resolve_io_mode(mode, [tmp_path], fits_cache=False)


def test_a_folder_without_files(tmp_path: Path) -> None:
    """What the disk's rate would be measured with is missing."""
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        plan.checkpoint_files(str(tmp_path))


def test_a_prompt_without_tokens(floats: Path, tmp_path: Path) -> None:
    """A tokenizer may drop all of it."""
    folder = shutil.copytree(floats, tmp_path / "model")
    file = folder / "tokenizer.json"
    drop = {"type": "Replace", "pattern": {"String": "w3"}, "content": ""}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": drop}))
    assert "makes no token of this prompt" in invoke("run", folder, "w3").stderr


# -- quantising ------------------------------------------------------------------------------------


def test_a_target_that_appears_meanwhile(floats: Path, tmp_path: Path) -> None:
    """It is not written over, and what was made is kept beside it."""
    target = tmp_path / "target"
    with pytest.raises(OptionError, match="has appeared meanwhile"):
        pipeload.quantize(floats, target, progress=lambda *_: target.mkdir(exist_ok=True))
    assert not list(target.iterdir())
    assert list((tmp_path / ".target.partial").glob("*.safetensors"))


def test_a_result_that_the_library_reads_otherwise(
    floats: Path, packed: Path, tmp_path: Path
) -> None:
    """Not at all as quantised, with other weights, or with weights of other shapes."""
    with pytest.raises(UnsupportedModelError, match="does not take"):
        check_result(floats, METHOD, 1)
    with pytest.raises(UnsupportedModelError, match="of 1 weights of LlamaForCausalLM"):
        check_result(packed, METHOD, 1)
    folder = shutil.copytree(packed, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 208}))
    with pytest.raises(UnsupportedModelError, match="does not find again"):
        check_result(folder, METHOD, 1)


def test_no_bitsandbytes(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names what to install, and what does without."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(OptionError, match=r"cannot be imported.*pip install 'pipeload\["):
        pipeload.quantize(floats, tmp_path / "target", method="nf4")


def test_integers_on_another_device() -> None:
    """Their kernels are the CPU's."""
    quantizer = PipeloadQuantizer(PipeloadConfig(8))
    with pytest.raises(OptionError, match="device_map has 'cuda:0'"):
        quantizer.validate_environment(device_map={"": "cuda:0"})


def test_kernels_with_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later torch, or bitsandbytes, may have one."""
    monkeypatch.setattr(order, "ORDERS", {})
    with pytest.raises(UnsupportedModelError, match="Use an int8 checkpoint"):
        order.kernel_order.__wrapped__()
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(tiles, "repack", lambda _packed, made: made.zero_())
    with pytest.raises(UnsupportedModelError, match="this version of bitsandbytes"):
        tiles.check_repacking.__wrapped__(False, 64)


# -- the benchmark ---------------------------------------------------------------------------------


def test_a_benchmark_of_nothing(floats: Path) -> None:
    """At least one of everything."""
    with pytest.raises(OptionError, match="at least one memory limit"):
        measure.run(model=str(floats), limits=["1GB"], new_tokens=8, rounds=0, as_json=True)


def test_a_measured_process_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last line and its status are told."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PipeloadError, match="ended with status 1"):
        measure.Worker("x").ask(load=1, host="-")


def test_a_disk_without_direct_reads(tmp_path: Path) -> None:
    """A folder has none, either."""
    with pytest.raises(OptionError, match=r"needs direct reads.*Errno"):
        measure.measure_disk([str(tmp_path)])
