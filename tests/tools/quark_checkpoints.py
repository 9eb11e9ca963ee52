#!/usr/bin/env python3
"""Whole checkpoints that AMD's Quark makes, against what it says itself their numbers are.

    pip install --no-deps amd-quark scipy onnx ml_dtypes onnxslim onnxscript onnx_ir joblib \
        zstandard plotly narwhals ninja evaluate pandas pytz
    python -m tests.tools.quark_checkpoints FOLDER

It is no dependency of anything here. A random LLaMA is quantised in every way that is taken over,
and saved by its own exporter. Plain transformers with Quark loads it; the weights that it makes of
each Linear have to be the very numbers that are decoded here, in fp32. What is streamed computes
what such numbers, rounded once, do in Linears. Status 1 if any of it is otherwise. It prints the
digests that tests/rooms/formats/codes/test_quark.py holds, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import pipeload
from pipeload.checkpoint.headers import read_headers
from pipeload.formats.codes.registry import codes_format
from tests.support.packers import SIZES, Packed, digest, known_codes, quark

FAR = 0.02
"""How far logits may be: products of few rows round their inputs."""
SCHEMES = (
    ("int4", "per_group"),
    ("uint4", "per_group"),
    ("int4", "per_channel"),
    ("uint4", "per_channel"),
    ("int8", "per_group"),
    ("int8", "per_channel"),
    ("int8", "per_tensor"),
    ("uint8", "per_channel"),
    ("uint8", "per_tensor"),
    ("fp8_e4m3", "per_channel"),
    ("fp8_e4m3", "per_tensor"),
    ("fp8_e5m2", "per_channel"),
    ("fp4", "per_group"),
)
