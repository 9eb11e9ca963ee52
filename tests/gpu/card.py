"""The card that is looked at, and what is compared on it. Needs torch and transformers alone.

With REHEARSE=1 in the environment a device made of host memory stands in for it: so that the
scripts themselves can be tried on a machine that has none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.tools.make_llama import LlamaShape, make_llama

if TYPE_CHECKING:
    from pathlib import Path

REHEARSED = os.environ.get("REHEARSE") == "1"
IDS = torch.arange(3, 40)[None]


@dataclass
class Card:
    """A device by its name, and a folder for checkpoints."""

    name: str
    where: torch.device
    scratch: Path
    fake: Any = None

    def checkpoint(self, name: str, shape: LlamaShape) -> Path:
        """A random LLaMA, made once."""
        return make_llama(shape, self.scratch / name)

    def plain(self, folder: Path, **options: Any) -> Any:
        """The whole model on the card, as transformers load it."""
        from transformers import AutoModelForCausalLM

        given = {"dtype": "auto"} | options
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **given)
        if self.fake is not None:  # where a device puts it: at addresses of the allocator's
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        return model.to(self.where)

    def stream(self, folder: Path, memory_limit: int, **options: Any) -> Any:
        """The model, streamed to the card."""
        import pipeload

        options = {"dtype": "auto", "device": self.name} | options
        return pipeload.from_pretrained(folder, memory_limit=memory_limit, **options)

    def limits(self, folder: Path, **options: Any) -> tuple[int, int]:
        """The smallest limit, and about the one from which on everything fits."""
        import pipeload

        options = {"dtype": "auto", "device": self.name} | options
        whole = pipeload.plan(folder, memory_limit=1 << 40, **options)
        return whole.smallest_limit, whole.memory_limit - whole.unused + (3 << 20)

    def reserved(self) -> int:
        """Bytes that the allocator holds now."""
        if self.fake is not None:
            return int(self.fake.reserved_bytes())
        return int(torch.accelerator.memory_reserved(self.where))

    def forget(self) -> None:
        """Have the allocator give back what nobody uses, and count its peak anew."""
        import gc

        gc.collect()
        if self.fake is not None:
            self.fake.peak = 0
        else:
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()

    def peak(self) -> int:
        """The most that it has held since."""
        if self.fake is not None:
            return int(self.fake.peak_bytes())
        return int(torch.accelerator.max_memory_reserved(self.where))


def find_card(scratch: Path) -> Card | None:
    """The accelerator of this machine; None without one."""
    if REHEARSED:
        from tests.support.fake_device import FakeDevice

        fake = FakeDevice(slow=0.0)
        mock.patch("pipeload.entry.request.open_device", return_value=fake).start()
        return Card("fake", torch.device("cpu"), scratch, fake)
    if not torch.accelerator.is_available():
        return None
    there = torch.accelerator.current_accelerator()
    assert there is not None
    if there.type not in {"cuda", "xpu"}:
        return None
    index = int(torch.accelerator.current_device_index())
    where = torch.device(there.type, index)
    return Card(str(where), where, scratch)
