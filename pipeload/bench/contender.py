"""One way of running a model, timed in a process of its own; knows nothing of pipeload's.

    PYTHON contender.py '{"way": "plain", "model": FOLDER, "tokens": 4, ...}'

Run as a file by an interpreter that has the contender, which need not be pipeload's. Prints a JSON
line: "first", seconds from the start of loading to the first token, libraries imported before;
"step", seconds for each of the others; "peak", bytes of memory, and "read", bytes of disk for each
token, where the system tells; "versions". Or "missing", what has to be installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

PROMPT = 16
_NEEDS = {
    "pipeload": ("pipeload", "torch", "transformers"),
    "plain": ("transformers", "torch"),
    "accelerate": ("accelerate", "torch", "transformers"),
    "airllm": ("airllm", "torch", "transformers"),
    "llama.cpp": ("xllamacpp",),
    "llama.cpp-repacked": ("xllamacpp",),
}


class Clock:
    """When each token came, and what had been read by then."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.read: list[int | None] = []

    def put(self, value: object) -> None:
        """Called with the prompt or a token, as a streamer of the library's is."""
        del value
        self.times.append(time.perf_counter())
        self.read.append(_told("/proc/self/io", "read_bytes:"))

    def end(self) -> None:
        """As a streamer has it."""


def _told(file: str, name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path(file).read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return None


def _import_all(model: str) -> None:
    """What every way imports, so that no time counts it."""
    import accelerate  # type: ignore[import-untyped]  # noqa: F401
    import transformers.generation
    from transformers import AutoConfig, AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(model))]  # noqa: SLF001
    with contextlib.suppress(ImportError):  # a checkpoint of its own forms is known by then
        import pipeload

        pipeload.from_pretrained  # noqa: B018 - imports it


def _pipeload(job: dict[str, Any], clock: Clock) -> None:
    import pipeload

    _import_all(job["model"])
    job["began"] = time.perf_counter()
    options = {"memory_limit": job["limit"], "dtype": "auto", "tokens": PROMPT + job["tokens"]}
    _generate(pipeload.from_pretrained(job["model"], **options), job, clock)


def _plain(job: dict[str, Any], clock: Clock) -> None:
    from transformers import AutoModelForCausalLM

    _import_all(job["model"])
    job["began"] = time.perf_counter()
    _generate(AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto"), job, clock)


def _accelerate(job: dict[str, Any], clock: Clock) -> None:
    from transformers import AutoModelForCausalLM

    options = {
        "device_map": "auto",
        "offload_folder": job["scratch"],
        "max_memory": {"cpu": job["share"]},
    }
    _import_all(job["model"])
    job["began"] = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto", **options)
    _generate(model, job, clock)


def _airllm(job: dict[str, Any], clock: Clock) -> None:
    from airllm import airllm_base

    # A model of random weights has no tokenizer, and what is timed needs none.
    airllm_base.AirLLMBaseModel.get_tokenizer = lambda _self, **_options: None
    _import_all(job["model"])
    job["began"] = time.perf_counter()
    options = {"device": "cpu", "layer_shards_saving_path": job["scratch"]}
    _generate(airllm_base.AirLLMBaseModel(job["model"], **options), job, clock)


def _generate(model: Any, job: dict[str, Any], clock: Clock) -> None:
    import torch

    model.generation_config.eos_token_id = None  # a timed run never stops early
    prompt = torch.arange(PROMPT)[None] + 5
    options = {"do_sample": False, "pad_token_id": 0, "use_cache": True, "streamer": clock}
    model.generate(prompt, max_new_tokens=job["tokens"], **options)


def _llama_cpp(job: dict[str, Any], clock: Clock) -> None:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = job["gguf"]
    settings.warmup, settings.fit_params = False, False
    settings.n_ctx, settings.n_parallel = 256, 1
    if job["way"] == "llama.cpp":
        # The file as it is, mapped: weights in another order would be a copy that few limits hold.
        settings.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
        settings.no_extra_bufts, settings.n_batch = True, 64
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = job["threads"]
    settings.verbosity = -1
    job["began"] = time.perf_counter()
    server = xllamacpp.Server(settings)
    clock.put(None)
    asked = {"prompt": [*range(5, 5 + PROMPT)], "max_tokens": job["tokens"], "temperature": 0}

    def came(answer: object) -> bool:
        clock.put(answer)
        return False

    server.handle_completions({**asked, "stream": True, "ignore_eos": True}, came)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run it, in whichever way; as the module says."""
    names = _NEEDS[job["way"]]
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        return {"missing": missing[0]}
    clock = Clock()
    ways = {
        "pipeload": _pipeload,
        "plain": _plain,
        "accelerate": _accelerate,
        "airllm": _airllm,
        "llama.cpp": _llama_cpp,
        "llama.cpp-repacked": _llama_cpp,
    }
    ways[job["way"]](job, clock)
    times = clock.times[1 : 1 + job["tokens"]]  # the first put is the prompt
    steps = [later - earlier for earlier, later in pairwise(times)]
    first, last = clock.read[1], clock.read[job["tokens"]]
    peak = _told("/proc/self/status", "VmHWM:")
    return {
        "first": times[0] - job["began"],
        "step": sum(steps) / len(steps),
        "peak": None if peak is None else peak * 1024,
        "read": None if first is None or last is None else (last - first) / len(steps),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def main(arguments: list[str]) -> None:
    """Print what came of the job."""
    sys.path.pop(0)  # the folder of this file, whose names are pipeload's
    print(json.dumps(run(json.loads(arguments[0]))))  # noqa: T201 - what this program is for


if __name__ == "__main__":
    main(sys.argv[1:])
