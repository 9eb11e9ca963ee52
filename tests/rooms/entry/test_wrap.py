"""wrap(): a model that plain from_pretrained made is streamed from then on, and nothing else is."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import re
import shutil
import subprocess
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import pipeload
from pipeload.errors import (
    CheckpointError,
    MemoryLimitError,
    OptionError,
    ReadError,
    UnsupportedModelError,
)
from pipeload.system import mappings
from pipeload.system.mappings import mappings_of
from tests.support.models import save_random
from tests.support.streaming import generated, logits, smallest_limit, steady_floor
from tests.support.sweeps import few
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import TinyCheckpoint


@pytest.fixture(autouse=True)
def floor() -> Iterator[None]:
    """Limits bite although the models are tiny."""
    with steady_floor(modules=True):
        yield


@pytest.fixture
def folder(tiny: TinyCheckpoint, tmp_path: Path) -> Path:
    """A copy of its own: some tests change it, and its mappings are counted."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "llama"))


def plain(folder: Path, **options: Any) -> Any:
    """As a user loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def tight(folder: Path, **options: Any) -> int:
    """A limit at which most is streamed. (What a heap model frees is taken off the floor.)"""
    return smallest_limit(folder, **options) + 8192


def is_streamed(model: Any) -> bool:
    return "pipeload" in model.__dict__


FAMILIES = ("llama", "gpt2", "qwen3", "phi3", "opt")


def anonymous(folder: Path) -> Any:
    """The configuration, without where it is from."""
    config = AutoConfig.from_pretrained(folder)
    config.name_or_path = ""
    return config


@pytest.mark.parametrize(
    ("family", "used"),
    few(
        itertools.product(FAMILIES, [False, True]),
        [*((family, True) for family in FAMILIES), ("llama", False)],
    ),
)
def test_equal_to_before(family: str, used: bool, tiny: TinyCheckpoint) -> None:
    """Same object, same bits, really streamed; plain again after remove()."""
    folder = tiny(family)
    expected, tokens = logits(plain(folder)), generated(plain(folder))
    model = plain(folder)
    if used:
        assert torch.equal(logits(model), expected)
    assert pipeload.wrap(model, tight(folder)) is model
    assert model.pipeload.plan.bytes_per_pass > 0
    assert torch.equal(logits(model), expected)
    assert generated(model) == tokens
    model.pipeload.remove()
    assert not is_streamed(model)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("how", ["loaded", "moved"])
def test_cast_models(dtype: torch.dtype, how: str, folder: Path) -> None:
    """Weights that were cast, by the loader or by the user, are cast again as they stream."""
    model = plain(folder, dtype=dtype) if how == "loaded" else plain(folder).to(dtype)
    expected = logits(model)
    heap = sum(p.numel() * p.element_size() for p in model.parameters())
    pipeload.wrap(model, tight(folder, dtype=dtype) + heap)
    assert model.pipeload.plan.bytes_per_pass > 0 or model.pipeload.plan.resident
    assert torch.equal(logits(model), expected)
    assert model.dtype == dtype


@pytest.mark.parametrize("kind", ["in place", "data", "new parameter", "embedding", "norm"])
def test_changed_weights(kind: str, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Refused by the name of the first; with spill_dir they stream from a file of their own."""
    folder = tiny("llama")
    model = plain(folder)
    name = change(model, kind)
    expected = logits(model)
    limit = tight(folder)
    with pytest.raises(CheckpointError, match=f"weight '{name}' .* is not what") as refusal:
        pipeload.wrap(model, limit)
    assert "spill_dir" in str(refusal.value)
    assert not is_streamed(model)
    assert torch.equal(logits(model), expected)

    pipeload.wrap(model, limit, spill_dir=tmp_path)
    (name,) = (link for link in open_files() if link.startswith(str(tmp_path)))
    assert ".safetensors (deleted)" in name  # open, and no name any more
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(logits(model), expected)
    model.pipeload.remove()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(logits(model), expected)


def open_files() -> set[str]:
    """Where the descriptors of this process lead to."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            links.append(str(descriptor.readlink()))
    return set(links)


def change(model: Any, kind: str) -> str:
    """Change one weight; returns its name."""
    layer = model.model.layers[1]
    name = {
        "embedding": "model.embed_tokens.weight",
        "norm": "model.layers.1.input_layernorm.weight",
    }.get(kind, "model.layers.1.self_attn.q_proj.weight")
    weight = model.get_parameter(name)
    with torch.no_grad():
        if kind == "new parameter":
            layer.self_attn.q_proj.weight = torch.nn.Parameter(weight * 2)
        elif kind == "in place":
            weight.add_(1)
        else:
            weight.data[1] += 1
    return name


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts the library stacks when it loads them."""
    config = AutoConfig.for_model(
        "mixtral",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=512,
    )
    return save_random(config, tmp_path_factory.mktemp("experts"), "fp32", seed=3)


def test_experts(experts: Path) -> None:
    """Weights that are made of many are compared, streamed and given back as they are made."""
    model = plain(experts)
    expected = logits(model)
    heap = sum(p.numel() * p.element_size() for p in model.parameters())
    pipeload.wrap(model, tight(experts) + heap)
    assert torch.equal(logits(model), expected)
    model.pipeload.set_memory_limit("100GB")
    model.pipeload.remove()
    assert torch.equal(logits(model), expected)


def test_an_expert_that_was_changed(experts: Path, tmp_path: Path) -> None:
    """It is found among those that the library stacked."""
    folder = experts
    model = plain(folder)
    name = next(n for n, _ in model.named_parameters() if "experts" in n)
    with torch.no_grad():
        model.get_parameter(name)[0, 0, 0] += 1
    expected = logits(model)
    with pytest.raises(CheckpointError, match=f"weight '{name}'"):
        pipeload.wrap(model, tight(folder))
    pipeload.wrap(model, tight(folder), spill_dir=tmp_path)
    assert torch.equal(logits(model), expected)


def test_a_model_without_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """From a configuration: everything is spilled, and only with leave."""
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(anonymous(folder))
    expected = logits(made)
    with pytest.raises(CheckpointError, match="not loaded from a checkpoint"):
        pipeload.wrap(made, "100GB")
    spill = tmp_path / "spill"
    spill.mkdir()
    heap = sum(p.numel() * p.element_size() for p in made.parameters())
    pipeload.wrap(made, tight(folder) + heap, spill_dir=spill)
    assert torch.equal(logits(made), expected)
    reference = weakref.ref(made)
    del made
    gc.collect()
    assert reference() is None
    assert list(spill.iterdir()) == []


def test_resized_embeddings(folder: Path, tmp_path: Path) -> None:
    """A weight of another shape is another weight."""
    model = plain(folder)
    model.resize_token_embeddings(600)
    expected = logits(model)
    with pytest.raises(CheckpointError, match=r"weight '(lm_head|model\.embed_tokens)\.weight'"):
        pipeload.wrap(model, "100GB")
    pipeload.wrap(model, tight(folder) + 10_000_000, spill_dir=tmp_path)
    assert torch.equal(logits(model), expected)


def test_a_limit_too_small_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """The refusal comes before anything is given away, and what it says works."""
    model = plain(folder)
    expected = logits(model)
    with torch.no_grad():
        model.lm_head.weight[3] += 1
    changed = logits(model)
    with pytest.raises(MemoryLimitError) as refusal:
        pipeload.wrap(model, 1000, spill_dir=tmp_path / "llama")
    assert [p for p in (tmp_path / "llama").iterdir() if p.name.startswith("pipeload-")] == []
    assert torch.equal(logits(model), changed)
    assert not torch.equal(changed, expected)
    pipeload.wrap(model, refusal.value.smallest_limit, spill_dir=tmp_path)
    assert torch.equal(logits(model), changed)


def test_on_meta(folder: Path) -> None:
    """A model without weights takes them from `checkpoint`, buffers and all."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(anonymous(folder))
    with pytest.raises(CheckpointError, match="checkpoint=FOLDER"):
        pipeload.wrap(model, "100GB")
    pipeload.wrap(model, tight(folder), checkpoint=folder)
    expected = plain(folder)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(logits(model), logits(expected))
    assert generated(model) == generated(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["engine.assembly.Streamer", "engine.guarded_methods.Hide", "engine.assembly.Handle"]
)
def test_an_interrupt_while_meta_is_filled(
    where: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is on the meta device again, and can be filled after all."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(anonymous(folder))

    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"pipeload.{where}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pipeload.wrap(model, tight(folder), checkpoint=folder)
    monkeypatch.undo()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    with steady_floor(modules=True):
        pipeload.wrap(model, tight(folder), checkpoint=folder)
        assert torch.equal(logits(model), logits(plain(folder)))


class Recorder:
    """Keeps what a module gave; not to be copied, as it may hold a lot."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __deepcopy__(self, memo: object) -> Recorder:
        raise AssertionError("copied")

    def before(self, _module: object, args: tuple[Any, ...]) -> None:
        self.seen += [arg for arg in args if isinstance(arg, torch.Tensor)]

    def after(self, _module: object, _args: object, output: torch.Tensor) -> None:
        self.seen.append(output)


def test_hooks_of_the_user(folder: Path) -> None:
    """They see what the user runs, and nothing of what is tried while the model is wrapped."""
    model = plain(folder)
    expected = logits(model)
    recorder = Recorder()
    model.model.layers[3].mlp.up_proj.register_forward_pre_hook(recorder.before)
    model.model.layers[3].mlp.up_proj.register_forward_hook(recorder.after)
    pipeload.wrap(model, tight(folder))
    assert recorder.seen == []
    assert model.pipeload.plan.bytes_per_pass > 0
    assert len(model.pipeload.plan.units) > 10  # it was tried all the same: blocks are cut
    assert torch.equal(logits(model), expected)
    assert [tensor.shape[-1] for tensor in recorder.seen] == [96, 176]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_hooks_that_make_weights(folder: Path) -> None:
    """They do so with every pass, as before."""
    model = plain(folder)
    torch.nn.utils.weight_norm(model.model.layers[3].mlp.up_proj)
    expected = logits(model)
    pipeload.wrap(model, tight(folder) + 500_000)
    assert model.pipeload.plan.bytes_per_pass > 0
    assert torch.equal(logits(model), expected)


def test_inside_inference_mode(folder: Path) -> None:
    """Parameters stay what they were: no inference tensors."""
    model = plain(folder)
    expected = logits(model)
    with torch.inference_mode():
        pipeload.wrap(model, tight(folder))
        logits(model)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    assert torch.equal(logits(model), expected)


def test_half_on_meta(folder: Path) -> None:
    """Nobody can say what the rest is."""
    model = plain(folder)
    model.model.layers[0].mlp.to("meta")
    with pytest.raises(OptionError, match="of them there, or none"):
        pipeload.wrap(model, "100GB")


def test_mapped_weights_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of hundreds of gigabytes is wrapped without reading it."""
    model = plain(folder)
    compared: list[str] = []

    def note(source: Any, *_: object) -> bool:
        compared.append(source.name)
        return True

    monkeypatch.setattr("pipeload.weights.same_weights._equal", note)
    pipeload.wrap(model, tight(folder))
    assert compared == []


def test_without_a_look_at_mappings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not tell, every weight is compared with the file."""
    for module in ("system.mappings", "weights.same_weights", "entry.wrap"):
        monkeypatch.setattr(f"pipeload.{module}.mappings_of", lambda _files: [])
    model = plain(folder)
    expected = logits(model)
    heap = sum(p.numel() * p.element_size() for p in model.parameters())
    pipeload.wrap(model, tight(folder) + heap)
    assert torch.equal(logits(model), expected)
    model.pipeload.set_memory_limit("100GB")
    changed = plain(folder)
    with torch.no_grad():
        changed.model.norm.weight[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        pipeload.wrap(changed, "100GB")


def test_a_reference_keeps_its_values(folder: Path) -> None:
    """Who holds a weight, or one changed in place, still sees it; the mapping's pages are gone."""
    model = plain(folder)
    kept = model.model.layers[0].mlp.up_proj.weight.data
    values = kept.clone()
    pipeload.wrap(model, tight(folder))
    logits(model)
    assert torch.equal(kept, values)
    files = list(folder.glob("*.safetensors"))
    assert mappings_of(files)  # one tensor keeps its whole file mapped


def test_written_pages_are_not_dropped(folder: Path) -> None:
    """Letting pages go must not undo what somebody wrote."""
    model = plain(folder)
    weight = model.model.layers[0].mlp.up_proj.weight.data
    logits(model)
    weight[0, 0] = 123.0
    changed, files = logits(model), list(folder.glob("*.safetensors"))
    mappings.let_go(files)
    kept = sum(mapping.anonymous for mapping in mappings_of(files))
    assert 0 < kept == in_memory(files)  # of the same file, too, nothing else stays
    assert weight[0, 0] == 123.0
    assert torch.equal(logits(model), changed)


def in_memory(files: list[Path]) -> int:
    """Bytes of mappings of `files` that this process has in memory."""
    text, found, ours = Path("/proc/self/smaps").read_text(), 0, False
    for line in text.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(tuple(map(str, files)))
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_pages_that_cannot_be_told_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then none of a file is dropped that somebody has written to."""
    model = plain(folder)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 123.0
    expected, files = logits(model), list(folder.glob("*.safetensors"))
    monkeypatch.setattr("builtins.open", denied)
    mappings.let_go(files)
    monkeypatch.undo()
    assert in_memory(files) > sum(mapping.anonymous for mapping in mappings_of(files))
    assert torch.equal(logits(model), expected)


def denied(*_args: object, **_options: object) -> None:
    raise PermissionError


def refused(folder: Path) -> dict[str, tuple[Any, type[Exception], str]]:
    streamed = pipeload.from_pretrained(folder, memory_limit="100GB")
    hooked = plain(folder)
    hooked.model._hf_hook = object()
    return {
        "twice": (streamed, OptionError, "streamed already"),
        "not the library's": (torch.nn.Linear(2, 2), UnsupportedModelError, "no transformers"),
        "dispatched": (hooked, OptionError, "accelerate"),
    }


def test_what_cannot_be_wrapped(folder: Path) -> None:
    """One clear error each."""
    for model, error, words in refused(folder).values():
        with pytest.raises(error, match=words):
            pipeload.wrap(model, "100GB")


def test_another_checkpoint(folder: Path, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """One with other values is refused; a folder that is not there is the library's error."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    changed = plain(folder)
    with torch.no_grad():
        changed.model.layers[0].mlp.down_proj.weight[0, 0] += 1
    changed.save_pretrained(other)
    model = plain(folder)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj"):
        pipeload.wrap(model, "100GB", checkpoint=other)
    pipeload.wrap(changed, tight(other), checkpoint=other)
    assert not torch.equal(logits(changed), logits(model))
    changed.pipeload.set_memory_limit("100GB")
    shutil.rmtree(folder)
    with pytest.raises(OSError, match="llama"):
        pipeload.wrap(model, "100GB")
    with pytest.raises((CheckpointError, OSError)):
        pipeload.wrap(model, "100GB", checkpoint=tmp_path / "nowhere")


@pytest.mark.parametrize("where", ["missing", "a file", "read only"])
def test_a_spill_folder_that_cannot_be_used(where: str, folder: Path, tmp_path: Path) -> None:
    """One clear error, nothing left behind."""
    place = tmp_path / "spill"
    if where == "a file":
        place.write_text("x")
    elif where == "read only":
        place = Path("/proc/self")
    model = plain(folder)
    with torch.no_grad():
        model.lm_head.weight[3] += 1
    expected = logits(model)
    with pytest.raises(OptionError, match="spill_dir="):
        pipeload.wrap(model, "100GB", spill_dir=place)
    assert torch.equal(logits(model), expected)


def test_a_full_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before anything is written, or in the middle of it: no file is left."""
    model = plain(folder)
    with torch.no_grad():
        model.lm_head.weight[3] += 1
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=10))
    spill = tmp_path / "spill"
    spill.mkdir()
    with pytest.raises(OptionError, match="has 10 B free"):
        pipeload.wrap(model, "100GB", spill_dir=spill)
    monkeypatch.undo()

    def full(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OptionError, match="No space left"):
        pipeload.wrap(model, "100GB", spill_dir=spill)
    assert list(spill.iterdir()) == []


def test_a_disk_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While what stays is read: the model is what it was."""
    model = plain(folder)
    expected = logits(model)

    def broken(*_args: object) -> int:
        raise ReadError("the disk failed")

    monkeypatch.setattr("pipeload.checkpoint.file_reads.FileSet.read_pages", broken)
    with pytest.raises(ReadError, match="the disk failed"):
        pipeload.wrap(model, tight(folder))
    monkeypatch.undo()
    assert not is_streamed(model)
    assert torch.equal(logits(model), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        "engine.assembly.Streamer",
        "engine.assembly.Adapters",
        "engine.hooking.Hooks.attach",
        "engine.guarded_methods._load_guard",
        "engine.guarded_methods.Hide",
        "engine.assembly.allow_copies",
        "engine.assembly.Handle",
    ],
)
def test_an_interrupt_on_the_way(
    where: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes, the model is the plain one that it was, and can be wrapped after all."""
    model = plain(folder)
    with torch.no_grad():
        model.lm_head.weight[3] += 1
    expected = logits(model)
    hooks = len(list_hooks(model))

    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    spill = tmp_path / "spill"
    spill.mkdir()
    monkeypatch.setattr(f"pipeload.{where}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pipeload.wrap(model, tight(folder), spill_dir=spill)
    monkeypatch.undo()
    assert torch.equal(logits(model), expected)
    assert not is_streamed(model)
    assert len(list_hooks(model)) == hooks
    assert list(spill.iterdir()) == []
    model.save_pretrained(tmp_path / "saved")
    with steady_floor(modules=True):
        pipeload.wrap(model, tight(folder), spill_dir=spill)
        assert torch.equal(logits(model), expected)


def list_hooks(model: Any) -> list[Any]:
    return [
        hook
        for module in model.modules()
        for kind in (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks)
        for hook in kind.values()
    ]


_MEMORY = r"""
import gc, json, sys, torch, pipeload
from pipeload.system.memory import rss_bytes
from transformers import AutoModelForCausalLM
folder, dtype = sys.argv[1:3]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
ids = torch.arange(3, 40)[None]
with torch.no_grad():
    before = model(ids).logits
used = rss_bytes()
size = sum(p.numel() * p.element_size() for p in model.parameters())
edited = sys.argv[4:]
if edited:
    with torch.no_grad():
        for layer in model.model.layers[::3]:
            layer.mlp.up_proj.weight[0] += 1
        before = model(ids).logits
    used = rss_bytes()
pipeload.wrap(model, int(sys.argv[3]), spill_dir=edited[0] if edited else None)
wrapped = rss_bytes()
with torch.no_grad():
    after = model(ids).logits
print(json.dumps(dict(used=used, wrapped=wrapped, after=rss_bytes(), size=size,
    equal=torch.equal(before, after), resident=model.pipeload.plan.resident)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "limit", "edited"),
    few(
        [
            ("bfloat16", 500_000_000, False),
            ("float32", 680_000_000, False),
            ("bfloat16", 500_000_000, True),
        ],
        [("bfloat16", 500_000_000, True)],
    ),
)
def test_memory_really_falls(
    dtype: str, limit: int, edited: bool, smollm2_bf16: Path, tmp_path: Path
) -> None:
    """A used model's pages, mapped, edited or cast, leave the process, which holds to its limit."""
    words = [str(smollm2_bf16), dtype, str(limit), *([str(tmp_path)] if edited else [])]
    done = subprocess.run(
        [*warm_python(), "-c", _MEMORY, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"]
    assert result["resident"] < result["size"]
    assert result["wrapped"] < result["used"] - 0.6 * result["size"]
    assert result["after"] <= limit
