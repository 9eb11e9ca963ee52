"""Results: pages are what their files say, and what stands beside pipeload is a fair reference."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from tests.results import __main__ as results
from tests.results import cells, frame, pictures, render, shapes, texts, whole_layers
from tests.results.__main__ import FULL, PARTS
from tests.support.models import load_plain

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

FILES = sorted(frame.STORE.glob("*.json"))


@pytest.mark.parametrize("page", render.PAGES, ids=lambda page: page.name)
def test_tables_are_made_of_the_files(page: Path) -> None:
    """If not: `python -m tests.results --render`."""
    text = page.read_text(encoding="utf-8")
    assert "<!-- table " in text
    assert render.filled(text) == text


def test_a_table_that_was_changed_by_hand_is_seen() -> None:
    """The test above could fail."""
    page = render.PAGES[2]
    text = page.read_text(encoding="utf-8")
    changed = text.replace("|---|", "|---|---|", 1)
    assert changed != text
    assert render.filled(changed) == text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_says_what_it_was_measured_with(file: Path) -> None:
    """Machine, versions, command and cache; and rows."""
    told = json.loads(file.read_text(encoding="utf-8"))
    assert {"processor", "cores", "memory", "disk_rate", "system"} <= told["machine"].keys()
    assert {"python", "torch", "transformers"} <= told["versions"].keys()
    part = re.match(r"python -m tests\.results (\w+)", told["command"])
    assert part is not None
    assert part[1] in PARTS
    assert told["cache"]
    assert told["rows"]
    unequal = [row for row in told["rows"] if row.get("equal") is False]
    assert unequal == []


def test_there_are_files_and_parts() -> None:
    """The tests above would pass if nothing were found."""
    assert len(FILES) >= 5
    assert set(FULL) < set(PARTS)
    assert all((frame.ROOT / "tests" / "results" / f"part_{part}.py").exists() for part in PARTS)


def test_pictures(tmp_path: Path) -> None:
    """Those that pages show are drawn from the files."""
    made = pictures.draw(tmp_path)
    names = {picture.name for picture in made}
    assert all(picture.stat().st_size > 5000 for picture in made)
    shown = {
        name
        for page in render.PAGES
        for name in re.findall(r"\]\([\w/]*results/(\w+\.png)\)", page.read_text(encoding="utf-8"))
    }
    assert shown <= names
    assert all((frame.STORE / name).exists() for name in shown)


@pytest.mark.parametrize(
    ("loaders", "keep"), [(0, False), (1, False), (1, True), (3, False)], ids=str
)
def test_whole_layers_give_what_plain_gives(
    loaders: int, keep: bool, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And hold m + 1 layers at most, two passes long."""
    folder = tiny("llama")
    held: list[int] = []
    leave = whole_layers.WholeLayers._leave

    def counted(self: Any, number: int) -> None:
        held.append(len(self._held))
        leave(self, number)

    monkeypatch.setattr(whole_layers.WholeLayers, "_leave", counted)
    auto = transformers.AutoModelForCausalLM
    model = whole_layers.load(auto, folder, loaders=loaders, keep=keep)
    plain = load_plain(folder)
    ids = torch.arange(12)[None] + 5
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(ids).logits, plain(ids).logits)
    layers = plain.config.num_hidden_layers
    assert len(held) == 2 * layers
    assert max(held) <= (layers if keep else loaders + 1)
    if keep:
        assert held[layers:] == [layers] * layers


def test_a_shape_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the tensors that the library's own class asks for, tied ones once."""
    small = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    small |= {"bos_token_id": 1, "eos_token_id": 2}
    shape = shapes.LibraryShape("GPT2Config", "GPT2LMHeadModel", small)
    monkeypatch.setitem(shapes.LIBRARY, "gpt2", shape)
    folder = shapes.make("gpt2", tmp_path)
    file = folder / "model.safetensors"
    before = file.stat().st_mtime_ns
    assert shapes.make("gpt2", tmp_path) == folder
    assert file.stat().st_mtime_ns == before
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    _, report = loaded
    assert not report["missing_keys"]
    assert "lm_head.weight" not in whole_layers.stored_in(folder)


def test_a_run_that_failed_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished parts are not measured again; after a whole run all begin anew."""
    ran: list[str] = []
    broken = {"two"}

    def part(name: str) -> Any:
        def run(_given: object) -> None:
            ran.append(name)
            if name in broken:
                raise RuntimeError("no disk")

        return SimpleNamespace(run=run)

    for name in ("one", "two", "three"):
        monkeypatch.setitem(sys.modules, f"tests.results.part_{name}", part(name))
    monkeypatch.setattr(results, "PARTS", ("one", "two", "three"))
    monkeypatch.setattr(results, "PROGRESS", tmp_path / "progress.json")
    monkeypatch.setattr(results, "lacking", dict)
    monkeypatch.setattr(render, "write", lambda: None)
    monkeypatch.setattr(sys, "argv", ["results", "--folder", str(tmp_path)])
    assert results.main() == 1
    assert ran == ["one", "two", "three"]
    broken.clear()
    assert results.main() == 0
    assert ran[3:] == ["two"]
    assert results.main() == 0
    assert ran[4:] == ["one", "two", "three"]


def test_what_cannot_run_here_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said why, others run, and nothing has failed."""
    ran: list[str] = []

    def skipped(_given: object) -> None:
        pytest.skip("no groups")

    parts = {"one": skipped, "two": skipped, "three": lambda _given: ran.append("three")}
    for name, run in parts.items():
        part = SimpleNamespace(run=run)
        monkeypatch.setitem(sys.modules, f"tests.results.part_{name}", part)
    monkeypatch.setattr(results, "PARTS", tuple(parts))
    monkeypatch.setattr(results, "PROGRESS", tmp_path / "progress.json")
    monkeypatch.setattr(results, "lacking", lambda: {"one": "no version 1"})
    monkeypatch.setattr(render, "write", lambda: None)
    monkeypatch.setattr(sys, "argv", ["results", "--folder", str(tmp_path)])
    assert results.main() == 0
    assert ran == ["three"]
    said = capsys.readouterr().err
    assert "one is left out: no version 1" in said
    assert "two is left out: no groups" in said


def test_parts_that_cannot_run_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without groups of version 1 no disk is slow; without any, theories alone are left."""

    def refused(_limit: int) -> None:
        raise PermissionError("not root")

    monkeypatch.setattr(results, "BLKIO", tmp_path)
    monkeypatch.setattr(results, "memory_group", lambda _limit: contextlib.nullcontext())
    assert results.lacking().keys() == {"disks"}
    monkeypatch.setattr(results, "memory_group", refused)
    assert results.lacking().keys() == set(PARTS) - {"theories"}


@pytest.mark.parametrize(
    ("value", "shown", "gained"),
    [
        (214.16, "210", "210"),
        (5.35, "5.3", "5.3"),
        (0.996, "1.0", "1.0"),
        (0.8, "0.80", "**0.80**"),
    ],
)
def test_ratios(value: float, shown: str, gained: str) -> None:
    """Two digits; bold where what is shown is behind, of pipeload's rows alone."""
    assert cells.times(value) == shown
    assert cells.gain(value) == gained
    assert cells.marked({"way": "pipeload, memory of m = 2", "x": value}, "x") == gained
    assert cells.marked({"way": "m = 2", "x": value}, "x") == shown
    slower = f"**{shown}**" if value > 1 else shown
    assert cells.cost({"way": "pipeload", "x": value}, "x") == slower


def test_a_file_says_how_it_came_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds in the command where they are not the usual ones, and seconds; pages add them up."""
    monkeypatch.setattr(frame, "STORE", tmp_path)
    monkeypatch.setattr(texts, "STORE", tmp_path)
    monkeypatch.setattr(frame, "machine", lambda _folder: {})
    assert texts.TEXTS["took"]() == "\n"
    for rounds, ending in ((frame.ROUNDS, ""), (5, " --rounds 5")):
        given = frame.Given(tmp_path, False, rounds, began=time.monotonic() - 600)
        file = frame.save("pi", given, [{"way": "plain"}], frame.COLD)
        told = json.loads(file.read_text(encoding="utf-8"))
        assert told["command"] == f"python -m tests.results pi{ending}"
        assert told["seconds"] >= 600
        assert given.anew().began > given.began
    (tmp_path / "disks.json").write_text('{"name": "disks"}', encoding="utf-8")
    assert "`make results` took 10 minutes (1 of 2 files)" in texts.TEXTS["took"]()


def test_a_file_that_ends_early_is_an_error(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Not a loader that reads for ever."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "short")
    for file in folder.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 4096)

    def run() -> None:
        model = whole_layers.load(transformers.AutoModelForCausalLM, folder, loaders=0)
        model(torch.arange(4)[None])

    with pytest.raises(EOFError, match=r"ends within .*, at byte \d+"):
        run()


@pytest.mark.slow
def test_runs_in_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way gives the same; a run that asks for more than its cap is told as killed."""
    from tests.results.forks import runner
    from tests.tools.make_llama import LlamaShape

    monkeypatch.setitem(shapes.LLAMA, "small", LlamaShape(128, 256, 4, 4, 4))
    folder = str(shapes.make("small", tmp_path))
    with runner() as forks:
        jobs = ({"way": "plain"}, {"way": "layers", "loaders": 2}, {"way": "pipeload"})
        limit = forks.run({"way": "limit", "share": 1.5, "folder": folder, "new": 3})["limit"]
        done = [forks.run(job | {"folder": folder, "new": 3, "limit": limit}) for job in jobs]
        assert len({one["digest"] for one in done}) == 1
        assert all(len(one["steps"]) == 2 and one["peak"] > one["floor"] for one in done)
        assert done[2]["peak"] <= limit
        late = jobs[0] | {"folder": folder, "new": 3}
        with pytest.raises(RuntimeError, match="more than 0 seconds"):
            forks.run(late, patience=0.01)
        assert forks.run(late)["digest"] == done[0]["digest"]  # and goes on
