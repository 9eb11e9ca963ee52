"""The helpers that other tests stand on do what they say."""

from __future__ import annotations

import sys
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from pipeload.budget.usage_trial import probe_usage
from tests.support.cgroups import drop_caches, peak_rss_bytes
from tests.support.known_models import fingerprint, known_usage
from tests.support.models import (
    FAMILIES,
    data_start,
    load_plain,
    save_random,
    tensor_files,
    tiny_config,
)
from tests.tools.make_llama import LlamaShape, main, make_llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.conftest import TinyCheckpoint
    from tests.support.cgroups import MemoryCgroup

    Cgroup = Callable[[int], AbstractContextManager[MemoryCgroup]]

MB = 1_000_000


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_checkpoints_have_no_two_equal_tensors(tiny: TinyCheckpoint, family: str) -> None:
    """Tensors that could be swapped unseen would make every other test blind."""
    folder = tiny(family, "bf16")
    tensors = load_all(folder)
    assert set(tensors) == set(tensor_files(folder))
    assert all(t.dtype == torch.bfloat16 and t.unique().numel() > 10 for t in tensors.values())
    same_shape = [
        (a, b)
        for a, b in combinations(tensors, 2)
        if tensors[a].shape == tensors[b].shape and torch.equal(tensors[a], tensors[b])
    ]
    assert same_shape == []


@pytest.mark.parametrize("family", FAMILIES)
def test_random_checkpoints_load(tiny: TinyCheckpoint, family: str) -> None:
    """Plain transformers find every tensor, and the logits are finite and not constant."""
    model = load_plain(tiny(family))
    logits = model(torch.arange(3, 20)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.argmax(-1).unique().numel() > 3


@pytest.mark.parametrize("mod16", [0, 8])
def test_data_can_start_anywhere(tmp_path: Path, mod16: int) -> None:
    """Padding moves the data and leaves every tensor as it was."""
    plain = save_random("llama", tmp_path / "plain", "fp32", seed=1)
    moved = save_random("llama", tmp_path / "moved", "fp32", seed=1, data_start_mod16=mod16)
    assert data_start(moved / "model.safetensors") % 16 == mod16
    expected, found = load_all(plain), load_all(moved)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


SMALL = LlamaShape(128, 192, 3, 4, 2, vocab=256, shard_bytes=300_000)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_made_llama_loads_and_runs(tmp_path: Path, dtype: str) -> None:
    """Plain transformers load it; numbers have the promised size; nothing ends a generation."""
    options = ["--hidden=128", "--intermediate=192", "--layers=3", "--heads=4", "--kv-heads=2"]
    options += ["--vocab=256", "--shard-size=300KB", f"--dtype={dtype}"]
    assert main([*options, str(tmp_path / "made")]) == 0
    model = load_plain(tmp_path / "made")
    tensors = load_all(tmp_path / "made")
    assert len({tensor.float().sum().item() for tensor in tensors.values()}) == len(tensors)
    for tensor in tensors.values():
        low, high = (1, 1.126) if tensor.ndim == 1 else (2**-7, 2**-5)
        assert low <= tensor.abs().min() <= tensor.abs().max() <= high
    output = model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=20, do_sample=False)
    assert output.shape == (1, 23)


def test_making_a_llama_is_repeatable(tmp_path: Path) -> None:
    """The same shape gives the same bytes, a finished folder is left alone, others are not ours."""
    first = make_llama(SMALL, tmp_path / "first")
    second = make_llama(SMALL, tmp_path / "second")
    files = sorted(file.name for file in first.iterdir())
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    before = (first / "config.json").stat().st_mtime_ns
    assert make_llama(SMALL, first) == first
    assert (first / "config.json").stat().st_mtime_ns == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(FileExistsError, match="holds something else"):
        make_llama(SMALL, tmp_path / "other")


def test_a_large_llama_of_headers_takes_no_room(tmp_path: Path) -> None:
    """The 70b preset looks its full size and is a hole on disk."""
    assert main(["--preset=70b-headers", str(tmp_path / "large")]) == 0
    files = [file.stat() for file in (tmp_path / "large").glob("*.safetensors")]
    assert sum(file.st_size for file in files) > 137e9
    assert sum(file.st_blocks * 512 for file in files) < MB


@pytest.mark.cgroup
def test_a_process_within_the_limit_is_left_alone(cgroup: Cgroup) -> None:
    """A small child ends well, and the group saw its memory."""
    with cgroup(100 * MB) as group:
        done = group.run([sys.executable, "-S", "-c", "print(len(bytearray(30_000_000)))"])
        assert (done.returncode, done.stdout) == (0, "30000000\n")
        assert group.oom_kills() == 0
        assert group.fail_count() == 0
        assert 30 * MB < group.peak_bytes() < 100 * MB
    assert not group.path.exists()


@pytest.mark.cgroup
def test_a_process_beyond_the_limit_is_killed(cgroup: Cgroup) -> None:
    """The limit is the kernel's: what it kills is seen in every count."""
    with cgroup(50 * MB) as group:
        done = group.run([sys.executable, "-S", "-c", "bytearray(b'1') * 200_000_000"])
        assert done.returncode == -9
        assert group.oom_kills() == 1
        assert group.fail_count() > 0


@pytest.mark.cgroup
def test_a_group_ends_with_what_runs_in_it(cgroup: Cgroup) -> None:
    """A child that is still running does not outlive the block."""
    with cgroup(100 * MB) as group:
        child = group.popen(["sleep", "60"])
        while not group.pids():
            assert child.poll() is None
        usage = group.usage_bytes()
        assert usage < 100 * MB
    assert child.wait(5) == -9


def test_models_that_trials_see_differently_are_told_apart() -> None:
    """By dtype, size, setting, mode, and by what their modules run; made again, one is the same."""

    def made(**options: Any) -> Any:
        config = tiny_config("llama", **options)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    def with_another_forward() -> Any:
        model = made()
        model.lm_head.__class__ = type("Head", (nn.Linear,), {})
        return model

    models = [
        made(),
        made().to(torch.bfloat16),
        made(intermediate_size=64),
        made(use_cache=False),
        made(attn_implementation="eager"),
        made().eval(),
        with_another_forward(),
    ]
    prints = [fingerprint(model) for model in models]
    assert len(set(prints)) == len(prints)
    assert fingerprint(made()) == prints[0]
    rebound = made()
    rebound.lm_head.forward = rebound.lm_head.forward
    assert fingerprint(rebound) is fingerprint(nn.Linear(1, 1)) is None
    assert known_usage(models[0]) == known_usage(made()) == probe_usage(models[0])


def test_caches_of_a_file_can_be_dropped(tmp_path: Path) -> None:
    """Files and folders are both taken."""
    (tmp_path / "file").write_bytes(b"x" * MB)
    drop_caches(tmp_path, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"x" * MB


def test_peak_rss_is_that_of_this_process() -> None:
    """The interpreter and torch alone are more than 50 MB."""
    assert 50 * MB < peak_rss_bytes() < 100_000 * MB
