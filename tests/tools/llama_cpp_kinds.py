#!/usr/bin/env python3
"""GGUF files of every kind that llama.cpp itself makes: streamed logits against a plain load's.

    pip install llama-cpp-cffi
    python -m tests.tools.llama_cpp_kinds

A random LLaMA in F16 is quantised by llama.cpp's own function, which that package carries. Each
file is loaded by plain transformers and streamed at its smallest limit. What pipeload refuses is
said, and must be refused by name.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

import pipeload
from pipeload.errors import MemoryLimitError, UnsupportedModelError
from tests.support.gguf_models import load_plain_gguf, save_gguf

KINDS: Final = {
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K_S": 11,
    "Q3_K_M": 12,
    "Q3_K_L": 13,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "Q2_K_S": 21,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ4_XS": 30,
    "BF16": 32,
}
"""Numbers of `llama_ftype`, in llama.h."""
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "head_dim": 128,
}
"""Rows of whole blocks of 256, and enough layers for some to be kept in more bits."""


class _Parameters(ctypes.Structure):
    """`llama_model_quantize_params`, of 2026."""

    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int),
        *(
            (name, ctypes.c_bool)
            for name in ("requantize", "output", "copy", "pure", "split", "dry")
        ),
        *((name, ctypes.c_void_p) for name in ("imatrix", "overrides", "types", "pruned")),
    )


def llama_cpp() -> ctypes.CDLL:
    """The library in the package llama-cpp-cffi.

    Raises:
        SystemExit: it is not installed.
    """
    found = importlib.util.find_spec("llama")
    places = [] if found is None else [Path(p) for p in found.submodule_search_locations or ()]
    for file in (file for place in places for file in place.glob("_llama_cpp_cpu*.so")):
        library = ctypes.PyDLL(str(file))
        library.llama_model_quantize_default_params.restype = _Parameters
        library.llama_model_quantize.argtypes = [
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.POINTER(_Parameters),
        ]
        return library
    sys.exit("There is no llama.cpp here. Install it: pip install llama-cpp-cffi")


def outputs(model: Any) -> list[torch.Tensor]:
    """Logits of a prompt and of the tokens after it, and those."""
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        made = model.generate(
            ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    return [*made.logits, made.sequences]


def check(file: Path) -> str:
    """What comes of one file: how it went, in a word or a sentence."""
    wanted = outputs(load_plain_gguf(file))
    try:
        pipeload.plan(file.parent, gguf_file=file.name, memory_limit=1)
    except MemoryLimitError as error:
        limit = error.smallest_limit
    except UnsupportedModelError as error:
        return f"refused: {str(error).splitlines()[0][:90]}"
    model = pipeload.from_pretrained(file.parent, gguf_file=file.name, memory_limit=limit)
    made = outputs(model)
    same = all(map(torch.equal, made, wanted)) and len(made) == len(wanted)
    read = model.pipeload.stats().bytes_read
    model.pipeload.set_memory_limit(10**12)
    model.pipeload.remove()
    if not read:
        return "WRONG: nothing was streamed"
    return "equal" if same else "WRONG: other bits"


def main() -> None:
    """Print a line for each kind; the exit status tells whether any was wrong."""
    library, wrong = llama_cpp(), 0
    with tempfile.TemporaryDirectory() as folder:
        floats = save_gguf(Path(folder), kinds=("F16",), name="floats.gguf", **SIZES)
        for kind, number in KINDS.items():
            file = Path(folder, f"{kind}.gguf")
            parameters = library.llama_model_quantize_default_params()
            parameters.ftype, parameters.nthread = number, 2
            pair = str(floats).encode(), str(file).encode()
            if library.llama_model_quantize(*pair, ctypes.byref(parameters)):
                print(f"{kind:8} llama.cpp does not make it without more data", flush=True)
                continue
            result = check(file)
            wrong += result.startswith("WRONG")
            print(f"{kind:8} {file.stat().st_size / 1e6:6.1f} MB  {result}", flush=True)
            file.unlink()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
