"""GGUF files give what plain transformers make of them, bit for bit, within any limit."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

import pipeload
from pipeload import (
    CheckpointChangedError,
    CheckpointError,
    OptionError,
    ReadError,
    UnsupportedModelError,
)
from pipeload.budget import cut, expert_banks
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.checkpoint.gguf import open_gguf
from pipeload.cli.run_report import describe_plan
from pipeload.formats.gguf import kernel
from tests.support.gguf_models import (
    ARCHITECTURES,
    MIXTRAL,
    load_plain_gguf,
    save_gguf,
    save_mixtral_of_file,
)
from tests.support.models import load_plain, skip_or_fail
from tests.support.streaming import (
    IDS,
    assert_nothing_held,
    finish_messages,
    generated,
    load_streamed,
    logits,
    prefetcher_of,
    smallest_limit,
    steady_floor,
)
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("gguf")

SPARE = (0, 400_000, 50_000_000)
LARGER: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}
"""Enough that what a process takes on is little beside."""
MIXTURE = ("Q4_K", "Q6_K", "Q4_0")
# Types in turns: those of a usual file, then all that there are.
USUAL = ("Q4_K", "Q6_K")
MIXES = {
    "q4_k_m": USUAL,
    "by 32": ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"),
    "by 256": ("Q2_K", "Q3_K", "Q5_K", "Q4_K", "Q6_K"),
    "by the package": ("IQ4_XS", "Q8_0"),
    "f16": ("F16",),
    "bf16": ("BF16",),
    "f32": ("F32",),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model of another test has a part in the limit; tables and ranges are small enough."""
    ACCOUNTANT.forget_all()
    monkeypatch.setattr(cut, "_TABLE_BYTES", 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A file of an architecture and types, made once."""
    files: dict[tuple[str, tuple[str, ...]], Path] = {}

    def make(architecture: str = "llama", kinds: tuple[str, ...] = USUAL) -> Path:
        key = architecture, kinds
        if key not in files:
            files[key] = save_gguf(tmp_path_factory.mktemp("gguf"), architecture, kinds)
        return files[key]

    return make


def streamed(path: Path, **options: Any) -> Any:
    return load_streamed(path.parent, gguf_file=path.name, modules=True, dtype=None, **options)


def assert_same(model: Any, reference: Any) -> None:
    """Logits and tokens, twice: what was read for a pass comes again for the next."""
    wanted = logits(reference)
    assert not wanted.isnan().any()
    for _ in range(2):
        assert torch.equal(logits(model), wanted)
    assert generated(model) == generated(reference)
    assert_nothing_held(model)


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture: str, made: Callable[..., Path]) -> None:
    """Each that is streamed, at a limit that holds nothing and at one that holds all."""
    path = made(architecture, ("Q4_0", "Q6_K", "Q8_0", "F16"))
    reference = load_plain_gguf(path)
    for spare in (0, 100_000_000):
        assert_same(streamed(path, spare=spare), reference)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_three_limits(dtype: torch.dtype, made: Callable[..., Path]) -> None:
    """Every dtype; then all is given back, and is plain's still."""
    path = made()
    reference = load_plain_gguf(path, dtype=dtype)
    for spare in SPARE:
        model = load_streamed(
            path.parent, gguf_file=path.name, modules=True, dtype=dtype, spare=spare
        )
        assert (spare < 10_000_000) == bool(model.pipeload.plan.bytes_per_pass)
        assert_same(model, reference)
    model.pipeload.remove()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert one.dtype == other.dtype == dtype
        assert one.requires_grad == other.requires_grad
        assert torch.equal(one, other), name
    assert torch.equal(logits(model), logits(reference))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        itertools.product(MIXES, [torch.float32, torch.bfloat16]),
        [(name, (torch.float32, torch.bfloat16)[n % 2]) for n, name in enumerate(MIXES)],
    ),
)
def test_types(name: str, dtype: torch.dtype, made: Callable[..., Path]) -> None:
    """Of blocks and of floats, by the kernel and by the package."""
    path = made("llama", MIXES[name])
    reference = load_plain_gguf(path, dtype=dtype)
    model = load_streamed(path.parent, gguf_file=path.name, modules=True, dtype=dtype)
    assert_same(model, reference)


@pytest.mark.slow
def test_without_a_compiler(made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The package unpacks, to the same bits."""
    path = made("llama", MIXES["by 256"])
    reference = load_plain_gguf(path)
    monkeypatch.setattr(kernel, "compiled", lambda: None)
    kernel.can_unpack.cache_clear()
    assert_same(streamed(path), reference)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["direct", "buffered", "uncached"])
def test_ways_of_reading(mode: str, made: Callable[..., Path]) -> None:
    """Blocks lie anywhere in a page."""
    path = made()
    try:
        model = streamed(path, io_mode=mode)
    except OptionError as error:
        pytest.skip(str(error))
    assert_same(model, load_plain_gguf(path))


@pytest.mark.slow
def test_heads_that_ranges_of_rows_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of queries and keys are put in order within heads of 128: ranges begin in the middle."""
    heads: dict[str, Any] = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    path = save_gguf(tmp_path, kinds=("Q4_0",), hidden_size=512, num_hidden_layers=2, **heads)
    monkeypatch.setattr(cut, "CHUNKS", (192 * 512 * 4,))
    reference = load_plain_gguf(path)
    model = streamed(path)
    cuts = [site for site in prefetcher_of(model).units if "q_proj[" in site.plan.name]
    assert len(cuts) > 1
    assert_same(model, reference)


@pytest.mark.slow
def test_split_files(tmp_path: Path, made: Callable[..., Path]) -> None:
    """All parts are read, and the head in the last is a head: plain knows the first alone."""
    first = save_gguf(tmp_path, kinds=USUAL, files=3)
    assert first.name == "model-00001-of-00003.gguf"
    model = streamed(first)
    assert len(prefetcher_of(model).units) > 1
    reference = load_plain_gguf(made())
    assert not model.config.tie_word_embeddings
    assert_same(model, reference)


@pytest.mark.slow
@pytest.mark.parametrize("vectors", ["Q8_0", "F32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors(vectors: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Norms in blocks are left to the library; biases of queries and keys are put in order."""
    options: dict[str, Any] = {"dtype": dtype, "attention_bias": True}
    path = save_gguf(tmp_path, vectors=vectors, num_hidden_layers=2, attention_bias=True)
    reference = load_plain_gguf(path, **options)
    model = load_streamed(path.parent, gguf_file=path.name, **options)
    assert "model.layers.1.self_attn.q_proj.bias" in dict(model.named_parameters())
    assert_same(model, reference)
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert one.ndim > 1 or torch.equal(one, other), name


@pytest.mark.slow
def test_rows_of_a_table_are_read_alone(tmp_path: Path) -> None:
    """An embedding of blocks is not held: a token reads its rows."""
    path = save_gguf(tmp_path, kinds=("Q8_0",), vocab_size=8192, num_hidden_layers=2)
    model = streamed(path)
    plan = model.pipeload.plan
    assert plan.pinned_bytes < 8192 * 256 * 4
    before = model.pipeload.stats().bytes_read
    logits(model)
    once = model.pipeload.stats().bytes_read - before
    assert once < path.stat().st_size
    assert_same(model, load_plain_gguf(path))


@pytest.mark.slow
def test_what_a_pass_reads(made: Callable[..., Path]) -> None:
    """As many bytes as are stored, within the borders of pages."""
    path = made()
    model = streamed(path)
    stored = sum(
        source.nbytes
        for unit in model.pipeload.plan.units
        for weight in unit.streamed.weights
        for source in weight.sources
    )
    assert 0 < stored < path.stat().st_size
    ids = torch.tensor([[5]])
    logits(model, ids)
    before = model.pipeload.stats().bytes_read
    for _ in range(3):
        logits(model, ids)
    read = (model.pipeload.stats().bytes_read - before) / 3
    assert stored <= read < 1.5 * stored  # tiny matrices: two pages are much of each


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kept_as_it_is_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    """Where the file fits and its floats do not, only the first pass reads; with less more do.

    What is kept follows the limit, and goes with the model.
    """
    path = save_gguf(tmp_path, kinds=USUAL, **LARGER)
    reference = load_plain_gguf(path, dtype=dtype)
    floats = sum(parameter.nbytes for parameter in reference.parameters())
    model = load_streamed(path.parent, gguf_file=path.name, dtype=dtype)
    least, wanted = model.pipeload.plan.memory_limit, logits(reference)
    for spare, reads in ((0.6, False), (0.15, True), (0.6, False), (0.0, True)):
        model.pipeload.set_memory_limit(least + int(spare * floats))
        assert torch.equal(logits(model), wanted)
        finish_messages(prefetcher_of(model))
        plan, before = model.pipeload.plan, model.pipeload.stats().bytes_read
        assert bool(plan.bytes_per_pass) == reads
        assert not plan.fits
        assert (plan.stored_bytes > 0) == (spare > 0)
        said = "kept as stored" in plan.table(), "as they are stored" in describe_plan(plan)
        assert said == (spare > 0, spare > 0)
        held = prefetcher_of(model).counters.resident_bytes
        assert held == plan.resident - plan.pinned_bytes
        assert torch.equal(logits(model), wanted)
        rows = reference.get_input_embeddings().weight[0].nbytes * IDS.numel()
        assert (model.pipeload.stats().bytes_read - before > 3 * rows) == reads
    assert_same(model, reference)
    model.pipeload.set_memory_limit(least + 3 * floats)
    assert_same(model, reference)
    assert model.pipeload.plan.fits
    model.pipeload.set_memory_limit(least + int(1.5 * floats))
    model.pipeload.remove()
    assert torch.equal(logits(model), wanted)


# -- ways in ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_as_it_is(made: Callable[..., Path]) -> None:
    """Inside of `streaming` the library's own call is answered, by name of the class as well."""
    path = made()
    wanted = logits(load_plain_gguf(path))
    for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        with steady_floor(), pipeload.streaming(smallest(path)):
            model: Any = kind.from_pretrained(path.parent, gguf_file=path.name)
        assert model.pipeload.plan.bytes_per_pass
        assert torch.equal(logits(model), wanted)
        ACCOUNTANT.forget_all()


def smallest(path: Path) -> int:
    return smallest_limit(path.parent, gguf_file=path.name)


@pytest.mark.slow
def test_plans(made: Callable[..., Path]) -> None:
    """What is planned is what is loaded, and reads no weights."""
    path = made()
    with steady_floor():
        limit = smallest(path)
        plan = pipeload.plan(path.parent, gguf_file=path.name, memory_limit=limit)
        model = pipeload.from_pretrained(path.parent, gguf_file=path.name, memory_limit=limit)
    assert plan.smallest_limit == limit
    assert model.pipeload.plan.bytes_per_pass == plan.bytes_per_pass > 0
    assert plan.scratch_bytes > 0


@pytest.mark.slow
def test_wrap(made: Callable[..., Path]) -> None:
    """A model that plain has made of a file is the file's; one that was changed is not."""
    path = made()
    model, changed = load_plain_gguf(path), load_plain_gguf(path)
    wanted = logits(model)
    with steady_floor():
        limit = smallest(path)
        pipeload.wrap(model, limit)
    assert model.pipeload.plan.units
    assert torch.equal(logits(model), wanted)
    with torch.no_grad():
        changed.model.layers[1].self_attn.q_proj.weight[3, 0] += 1
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj"):
        pipeload.wrap(changed, limit)


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(dtype: torch.dtype, made: Callable[..., Path]) -> None:
    """One by one, of two stacks of unlike types; what no token is sent to is not read."""
    path = made("qwen3moe", MIXTURE)
    stacks = open_gguf(path).checkpoint.entries
    of_each = sum(e.nbytes // e.shape[0] for name, e in stacks.items() if "_exps" in name)
    reference = load_plain_gguf(path, dtype=dtype)
    for spare in (0, 100_000_000):
        model = load_streamed(
            path.parent, gguf_file=path.name, modules=True, dtype=dtype, spare=spare
        )
        assert model.pipeload.plan.whole_experts == ()
        assert_same(model, reference)
        stats = model.pipeload.stats()
        assert stats.expert_bytes_read >= stats.expert_misses * of_each // 2
        if not spare:
            share = model.pipeload.plan.experts.bytes_per_token
            assert share == pytest.approx(2 * of_each, rel=0.1)
    model.pipeload.remove()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixtral(dtype: torch.dtype, tmp_path: Path) -> None:
    """To plain transformers it is a LLaMA without MLPs, which are made up; here it is Mixtral."""
    path = save_gguf(tmp_path, "llama", ("Q8_0",), **MIXTRAL)
    reference = load_plain(save_mixtral_of_file(tmp_path / "floats", "Q8_0"), dtype=dtype)
    for spare in (0, 100_000_000):
        model = load_streamed(tmp_path, gguf_file=path.name, modules=True, dtype=dtype, spare=spare)
        assert type(model) is type(reference)
        assert model.pipeload.plan.whole_experts == ()
        assert_same(model, reference)


def test_experts_that_are_read_whole(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their block, where a layer's are too small to be read one by one; wrapped, too."""
    monkeypatch.setattr(expert_banks, "_BANK_BYTES", 1 << 30)
    path = made("qwen3moe", MIXTURE)
    reference = load_plain_gguf(path)
    for spare in (0, 100_000_000):
        model = streamed(path, spare=spare)
        assert model.pipeload.plan.whole_experts
        assert_same(model, reference)
        model.pipeload.remove()
    live = load_plain_gguf(path)
    pipeload.wrap(live, memory_limit="4GB")
    assert_same(live, reference)
    live.pipeload.remove()
    with torch.no_grad():
        live.model.layers[1].mlp.experts.gate_up_proj[2, 300, 5] += 1
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj"):
        pipeload.wrap(live, memory_limit="4GB")


def test_a_file_that_is_cut_short(made: Callable[..., Path], tmp_path: Path) -> None:
    """Named before the library looks at it."""
    path = tmp_path / "short.gguf"
    path.write_bytes(made().read_bytes()[:-1000])
    for load in (pipeload.from_pretrained, pipeload.plan, in_a_context):
        with pytest.raises(CheckpointError, match=r"short\.gguf.*is truncated"):
            load(tmp_path, gguf_file=path.name)


def in_a_context(folder: Path, **options: Any) -> object:
    with pipeload.streaming("100GB"):
        return transformers.LlamaForCausalLM.from_pretrained(folder, **options)


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    """Nothing, or something else."""
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match="not with 'GGUF'"):
        pipeload.from_pretrained(tmp_path, gguf_file="model.safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        pipeload.from_pretrained(tmp_path, gguf_file="model.gguf")


@pytest.mark.slow
def test_a_disk_that_fails(made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """While blocks are read, or rows of a table; then it recovers, and so does the model."""
    path = made()
    reference = load_plain_gguf(path)
    read, sick = os.preadv, threading.Event()

    def read_or_fail(*args: Any) -> int:
        if sick.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*args)

    monkeypatch.setattr(os, "preadv", read_or_fail)
    model = streamed(path)
    for _ in range(2):
        finish_messages(prefetcher_of(model))
        sick.set()
        with pytest.raises(ReadError, match=r"model\.gguf' at byte \d+ failed.*Input/output"):
            generated(model)
        sick.clear()
        assert_same(model, reference)


@pytest.mark.slow
def test_a_file_that_changes_meanwhile(made: Callable[..., Path], tmp_path: Path) -> None:
    """Is not read on as if nothing were."""
    path = tmp_path / "model.gguf"
    path.write_bytes(made().read_bytes())
    model = streamed(path)
    logits(model)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointChangedError, match=r"model\.gguf"):
        logits(model)


@pytest.mark.slow
def test_ctrl_c(made: Callable[..., Path]) -> None:
    """In the middle of a block: the next pass is right."""
    path = made()
    reference = load_plain_gguf(path)
    model = streamed(path)

    def interrupt(*_: object) -> None:
        hook.remove()
        raise KeyboardInterrupt

    for layer in (0, 2):
        hook = model.model.layers[layer].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            logits(model)
        assert_same(model, reference)


# -- what is refused, and what is said -------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "extra", "words"),
    [
        ("mamba", {}, "'mamba' and cannot be streamed: transformers changes its values"),
        ("llama", {"llama.expert_count": 8}, "it is a mixture of experts"),
        ("llama4", {"llama4.expert_count": 8}, "it is a mixture of experts"),
        ("gemma4", {}, "nobody has tried that; falcon, gemma2, gemma3, "),
        ("qwen35", {}, "transformers does not know it in such files, or changes its values"),
    ],
)
def test_architectures_that_are_refused(
    architecture: str, extra: dict[str, int], words: str, tmp_path: Path
) -> None:
    """By name, with what to use instead, before the library looks at the file."""
    gguf: Any = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), architecture)
    for key, value in extra.items():
        writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for load in (pipeload.from_pretrained, pipeload.plan):
        with pytest.raises(UnsupportedModelError, match=words) as refusal:
            load(tmp_path, gguf_file="m.gguf")
        assert "pipeload quantize" in str(refusal.value)


@pytest.mark.slow
def test_experts_of_old_files(tmp_path: Path) -> None:
    """Which have each one's matrices by themselves."""
    one = {"blk.0.ffn_gate.0.weight": np.zeros((4, 32), np.float32)}
    path = save_gguf(tmp_path, "llama", ("F32",), extra=one, **MIXTRAL)
    with pytest.raises(UnsupportedModelError, match="stored one by one, as in files from before"):
        streamed(path)


def test_a_model_that_has_no_names(tmp_path: Path) -> None:
    """Plain does not load it either: the package knows none for what the library makes of it."""
    path = save_gguf(tmp_path, num_hidden_layers=2, extra={"general.name": "mistral"})
    with pytest.raises(NotImplementedError):
        load_plain_gguf(path)
    with pytest.raises(UnsupportedModelError, match="Unknown gguf model_type: mistral"):
        streamed(path)


@pytest.mark.slow
def test_a_type_that_nobody_unpacks(tmp_path: Path) -> None:
    """Refused by tensor and type."""
    path = save_gguf(tmp_path, kinds=("Q8_0",))
    data = bytearray(path.read_bytes())
    place = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    assert data[place] == 8
    data[place] = 36  # no type any more
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.weight' is of type 36"):
        pipeload.plan(tmp_path, gguf_file=path.name)
    whole = save_gguf(
        tmp_path,
        kinds=("Q8_0",),
        without=["blk.1.ffn_up.weight"],
        extra={"blk.1.ffn_up.weight": np.zeros((512, 256), np.int32)},
    )
    words = r"'model\.layers\.1\.mlp\.up_proj\.weight' in .* is of type I32, which the installed"
    with pytest.raises(UnsupportedModelError, match=words):
        pipeload.plan(tmp_path, gguf_file=whole.name)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says how to install it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(
        OptionError, match=r"needs the package gguf.*pip install 'pipeload\[gguf\]'"
    ):
        pipeload.plan(tmp_path, gguf_file="m.gguf")


@pytest.mark.slow
def test_quantise_refuses_it(made: Callable[..., Path], tmp_path: Path) -> None:
    """It is quantised already."""
    path = made()
    with pytest.raises(UnsupportedModelError, match="is quantised already, by 'gguf'"):
        pipeload.quantize(path.parent, tmp_path / "made", gguf_file=path.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            {"rope_freqs.weight": np.ones(32, np.float32)},
            r"stretches positions .*rope_freqs\.weight",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "stretches positions .*rope scaling of type yarn"),
        (
            {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7},
            r"ends answers with token 7, .*eos_token_id = \[2, 7\]",
        ),
        ({"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 7}, None),
        ({"llama.rope.scaling.type": "none"}, None),
    ],
)
def test_what_a_plain_load_loses(
    extra: dict[str, Any],
    words: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Said once: results are plain's, and plain's are not the original's."""
    path = save_gguf(tmp_path, kinds=("Q8_0",), num_hidden_layers=2, extra=extra)
    with caplog.at_level(logging.WARNING, "pipeload"):
        model = streamed(path)
    said = [r.getMessage() for r in caplog.records if r.name == "pipeload"]
    found = [text for text in said if "plain load" in text]
    assert torch.equal(logits(model), logits(load_plain_gguf(path)))
    if words is None:
        assert found == []
    else:
        assert re.search(words, found[0])


# -- a real one ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Path]:
    """SmolLM2-135M-Instruct, in Q4_1 and Q8_0."""
    from pipeload.demo.model import _find_gguf

    try:
        yield _find_gguf()
    except pipeload.PipeloadError as error:
        skip_or_fail(f"no SmolLM2: {error}", required_by="PIPELOAD_REQUIRE_MODELS")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_smollm2(smollm2: Path, dtype: torch.dtype) -> None:
    """As users have it: the library's tokenizer, a prompt, and an answer, at two limits."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name
    )
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    reference = load_plain_gguf(smollm2, dtype=dtype)
    wanted, tokens = logits(reference, ids), generated(reference, ids)
    assert "Paris" in tokenizer.decode(tokens)
    del reference
    for spare in (0, 2_000_000_000):
        model = load_streamed(
            smollm2.parent, gguf_file=smollm2.name, modules=True, dtype=dtype, spare=spare
        )
        assert torch.equal(logits(model, ids), wanted)
        assert generated(model, ids) == tokens
        if not spare:
            assert model.pipeload.plan.bytes_per_pass <= smollm2.stat().st_size * 1.02
