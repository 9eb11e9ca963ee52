"""Other programs that run a model larger than memory, by `pipeload bench --compare`.

Those that are no dependency are installed in environments of their own, beside the models.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from gguf import GGMLQuantizationType as Kind

from pipeload.bench.compare import Compared, Setting, compare
from tests.results import frame
from tests.results.forks import runner
from tests.tools.make_gguf import make_gguf
from tests.tools.moe_against_llama_cpp import make_moe_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from tests.results.frame import Given

SHARES = (0.3, 0.5, 0.8, 1.0)
"""Of the weights, beside what Python and its libraries take."""
PACKAGES = {"airllm": ("torch", "airllm==4.0.0"), "llama.cpp": ("xllamacpp==2026.10.11549",)}
FLOATS, INTEGERS = ("plain", "accelerate", "airllm"), ("llama.cpp",)
SMALL = {"llama-small": FLOATS, "llama-7b-8-int4": INTEGERS, "moe-30b-2-int4": INTEGERS}
FULL = {"llama-1.1b": FLOATS, "llama-7b-int4": INTEGERS, "moe-30b-6-int4": INTEGERS}
"""The last has the experts of Qwen3-30B-A3B in fewer layers."""


def run(given: Given) -> None:
    """A bf16 model against those that read safetensors, those in int4 against llama.cpp."""
    pythons = {way: str(environment(given.folder, way)) for way in PACKAGES}
    rows: list[frame.Row] = []
    for name, ways in (FULL if given.full else SMALL).items():
        folder = given.model(name)
        gguf = given.folder / f"{name}.gguf"
        if ways == INTEGERS and not gguf.exists():
            (make_moe_gguf if name.startswith("moe") else make_gguf)(folder, gguf, Kind.Q4_0)
        with runner() as forks:
            job = {"folder": str(folder), "way": "limit", "new": 8}
            limits = [forks.run(job | {"share": share})["limit"] for share in SHARES]
        setting = Setting(
            model=str(folder),
            ways=ways,
            pythons={way: python for way, python in pythons.items() if way in ways},
            gguf=str(gguf) if gguf.exists() else None,
            new_tokens=3,
            rounds=given.rounds,
        )
        found = compare(setting, limits, progress=lambda line: frame.tell(f"  {line}"))
        shares = dict(zip(limits, SHARES, strict=True))
        rows += [{"model": name, "share": shares[row.limit], **_told(row)} for row in found]
        frame.save("peers", given, rows, f"{frame.COLD}; kernel memory groups of the limit")


def _told(row: Compared) -> frame.Row:
    return asdict(row) | {"versions": dict(row.versions)}


def environment(folder: Path, way: str) -> Path:
    """The interpreter of an environment that has this contender, made if it is not there."""
    place = folder / "environments" / way
    python = place / "bin" / "python"
    done = place / "complete"
    if not done.exists():
        frame.tell(f"  installing {way}")
        pins = frame.ROOT / ".ci" / "constraints.txt"
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        for package in PACKAGES[way]:  # torch by itself first, as the Makefile does
            install = ["-m", "pip", "install", "-q", "--no-compile", "-c", str(pins), package]
            subprocess.run([str(python), *install], check=True)
        done.touch()
    return python
