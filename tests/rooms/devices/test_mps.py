"""Apple's GPUs, with a stand-in for `torch.mps` that computes late and on host memory.

No Mac is needed, so none is proved to do it. What the stand-in does not have is asked of the real
`torch.mps`, which can be imported everywhere: a name that is not there fails here as well.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import inspect
import queue
import threading
import time
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload.devices import mps, torch_accelerator
from pipeload.devices import open_device as devices_open_device
from pipeload.devices.device_parameters import DeviceSeat
from pipeload.devices.mps import MpsDevice
from pipeload.devices.open_device import open_device
from tests.promises.exact.test_device import EVERYTHING, PART, load, plan_for, reference, smallest
from tests.rooms.devices.test_torch_accelerator import Recorded
from tests.support.fake_device import FakeDevice
from tests.support.streaming import check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import TinyCheckpoint

RECOMMENDED = 8_000_000_000
LIBRARIES = 1_000_000
_real: Any = torch.mps


class StandIn:
    """`torch.mps`: one queue, whose work ends some time after it was enqueued.

    What a block computes with must stay as it was for that long, which is checked at its end.
    """

    def __init__(self) -> None:
        self.memory = FakeDevice(slow=0.0)
        self.slow = 0.004
        self.calls: list[str] = []
        self.share = 1.7
        self.peak = 0
        self.bound: list[torch.Tensor] = []
        """Memory of blocks that compute now."""
        self.torn = self.checked = 0
        self.Event = lambda: Event(self)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stand-in", daemon=True).start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self.slow)
            work()
            del work

    def close(self) -> None:
        self.memory.close()
        self._work.put(None)

    def enqueue(self, passed: threading.Event) -> None:
        places = list(self.bound)
        before = [_sum(place) for place in places]

        def work() -> None:
            self.checked += len(places)
            self.torn += [_sum(place) for place in places] != before
            places.clear()
            passed.set()

        self._work.put(work)

    def take(self, nbytes: int) -> torch.Tensor:
        """What torch does for `empty` there."""
        if self.driver_allocated_memory() + nbytes > self.share * RECOMMENDED:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)")
        taken = self.memory.allocate(nbytes)
        self.peak = max(self.peak, self.driver_allocated_memory())
        return taken

    def _host_alias_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return storage

    def current_allocated_memory(self) -> int:
        return self.memory.allocated_bytes()

    def driver_allocated_memory(self) -> int:
        return self.memory.allocated_bytes() + LIBRARIES

    def recommended_max_memory(self) -> int:
        return RECOMMENDED

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def set_per_process_memory_fraction(self, fraction: Any) -> None:
        assert isinstance(fraction, float)
        assert 0 < fraction <= 2
        self.share = fraction

    def __getattr__(self, name: str) -> Any:
        return getattr(_real, name)


class Event:
    def __init__(self, gpu: StandIn, enable_timing: bool = False) -> None:
        self._gpu = gpu
        self._passed = threading.Event()

    def record(self) -> None:
        self._gpu.calls.append("record")
        self._gpu.enqueue(self._passed)

    def query(self) -> bool:
        return self._passed.is_set()


class Torch:
    """torch, but for that."""

    def __init__(self, gpu: StandIn) -> None:
        self.mps = gpu

    def empty(self, size: int, **options: Any) -> torch.Tensor:
        device = options.get("device")
        return torch.empty(size, **options) if device is None else self.mps.take(size)

    def ones(self, shape: Any, **options: Any) -> torch.Tensor:
        return torch.ones(shape, dtype=options["dtype"])

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _sum(place: torch.Tensor) -> int:
    return zlib.crc32(ctypes.string_at(place.data_ptr(), place.numel()))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Told which memory blocks compute with."""
    made = StandIn()
    for module in (mps, torch_accelerator):
        monkeypatch.setattr(module, "torch", Torch(made))
    bind, unbind = DeviceSeat.bind, DeviceSeat.unbind

    def bind_known(seat: DeviceSeat, unit: Any) -> None:
        bind(seat, unit)
        if seat._slot is not None and seat._slot._memory is not None:
            made.bound.append(seat._slot._memory)

    def unbind_known(seat: DeviceSeat) -> None:
        unbind(seat)
        made.bound.clear()

    monkeypatch.setattr(DeviceSeat, "bind", bind_known)
    monkeypatch.setattr(DeviceSeat, "unbind", unbind_known)
    yield made
    gc.collect()
    made.close()
    assert made.torn == 0, "memory was written to while it was computed with"


@pytest.fixture
def device(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> MpsDevice:
    """The one that any name opens; what its tensors say is the processor, so that models run."""
    made = MpsDevice(torch.device("cpu"))
    monkeypatch.setattr("pipeload.entry.request.open_device", lambda _name: made)
    return made


def test_what_is_asked_of_torch_is_there() -> None:
    """All names of `torch.mps` that the file has, and with the arguments of the stand-in."""
    tree = ast.parse(inspect.getsource(mps))
    asked = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_mps(n.value)}
    assert "current_allocated_memory" in asked
    assert [name for name in asked if not hasattr(_real, name)] == []
    functions = asked - {"Event"}
    for owner, theirs, names in ((StandIn, _real, functions), (Event, _real.Event, EVENT)):
        for name in names:
            ours = list(inspect.signature(getattr(owner, name)).parameters)
            wanted = list(inspect.signature(getattr(theirs, name)).parameters)
            assert ours[-len(wanted) :] == wanted or not wanted, name
            assert len(ours) == len(wanted) + (owner is StandIn), name


EVENT = {"record", "query"}


def _is_mps(node: ast.expr) -> bool:
    return ast.unparse(node) == "torch.mps"


def test_names(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the others; "auto" leaves it alone: no Mac has shown that it works."""
    there = Recorded("mps", count=1)
    there.accelerator.current_device_index = lambda: 0
    monkeypatch.setattr(devices_open_device, "torch", there)
    monkeypatch.setattr(devices_open_device, "_opened", {})
    found = open_device("mps")
    assert isinstance(found, MpsDevice)
    assert found.where == torch.device("mps", 0)
    assert open_device("mps:0") is found
    assert open_device("auto") is None
    with pytest.raises(pipeload.OptionError, match=r"finds 1 of 'mps'"):
        open_device("mps:1")
    with pytest.raises(pipeload.OptionError, match=r"'cuda' is not there: .* 'mps' alone"):
        open_device("cuda")


@pytest.mark.parametrize(
    ("family", "spare"), [("llama", 0), ("llama", PART), ("llama", EVERYTHING), ("gpt2", PART)]
)
def test_the_same_output(
    tiny: TinyCheckpoint, gpu: StandIn, device: MpsDevice, family: str, spare: int
) -> None:
    """Whatever stays there, and though the GPU is behind; within the limit that torch keeps."""
    folder = tiny(family)
    expected = reference(folder)
    model = load(folder, spare=spare)
    plan = model.pipeload.plan
    for _ in range(3):
        check(model, expected)
    assert plan.fits is (spare == EVERYTHING)
    assert gpu.checked > 0 or plan.fits, "nothing was watched"
    assert gpu.share * RECOMMENDED == pytest.approx(plan.memory_limit)
    assert device.peak_bytes() <= gpu.peak <= plan.memory_limit
    assert model.pipeload.stats().locked is plan.fits


def test_nothing_stays_in_host_memory(tiny: TinyCheckpoint, device: MpsDevice) -> None:
    """It would be the same memory once more: neither planned, nor later, nor with more room."""
    folder = tiny("llama")
    least = smallest(folder)
    assert plan_for(folder, memory_limit=least, disk_rate=1e6).hosted_bytes == 0
    model = load(folder)
    expected = reference(folder)
    for _ in range(8):
        check(model, expected)
    model.pipeload.set_memory_limit(least, host_memory_limit="9GB")
    check(model, expected)
    assert model.pipeload.plan.hosted_bytes == 0


def test_doubles_are_refused(tiny: TinyCheckpoint, device: MpsDevice) -> None:
    """With what to do, which works."""
    folder = tiny("llama")
    with pytest.raises(pipeload.UnsupportedModelError, match=r"none of \('.*torch\.float64\)"):
        load(folder, dtype=torch.float64)
    check(load(folder, dtype=torch.float32), reference(folder))


def test_a_copy_waits_for_the_computing_before_it(gpu: StandIn, device: MpsDevice) -> None:
    """And has ended when it returns; nobody waits for it."""
    to, values = device.allocate(1000), torch.arange(250, dtype=torch.uint8)
    gpu.slow = 0.05
    computed = device.computed()
    event = device.copy([(to[512:762], values)], computed)
    assert computed.event.query()  # type: ignore[attr-defined]
    assert torch.equal(to[512:762], values)
    gpu.calls.clear()
    device.wait(event)
    event.synchronize()
    assert gpu.calls == []


def test_memory_is_handed_out_behind_its_last_owner(gpu: StandIn, device: MpsDevice) -> None:
    """The processor will write to it, and knows no queue."""
    gpu.slow = 0.05
    before = device.computed()
    device.allocate(100)
    assert before.event.query()  # type: ignore[attr-defined]


def test_from_one_place_on_the_device_to_another(gpu: StandIn, device: MpsDevice) -> None:
    """By the device, and waited for."""
    done: list[object] = []
    there: Any = SimpleNamespace(is_cpu=False)
    to: Any = SimpleNamespace(copy_=done.append)
    gpu.calls.clear()
    device.copy_now(to, there)
    assert done == [there]
    assert gpu.calls == ["record"]


def test_figures_and_limit(
    gpu: StandIn, device: MpsDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's, and as a share of what Metal recommends; never 0, which is none."""
    held = device.allocate(1000)
    assert (device.allocated_bytes(), device.reserved_bytes()) == (1000, 1000 + LIBRARIES)
    free = [RECOMMENDED]
    monkeypatch.setattr(mps, "room_bytes", lambda: free[0])
    assert device.free_bytes() == RECOMMENDED - held.numel() - LIBRARIES
    free[0] = 12345
    assert device.free_bytes() == 12345
    shares = []
    for limit in (2_000_000_000, 100_000_000_000, 0, None):
        device.cap(limit)
        shares.append(gpu.share)
    assert shares == [0.25, 1.7, 1 / RECOMMENDED, 1.7]
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "1.25")
    for limit in (100_000_000_000, None):
        device.cap(limit)
        assert gpu.share == 1.25, "more than the user's own limit"
    assert not device.pin(4096, 4096)
    assert (device.link_rate() or 0) > 0


def test_memory_that_is_refused(gpu: StandIn, device: MpsDevice) -> None:
    """torch raises a plain error there; ours is the one of the other accelerators."""
    device.cap(2_000_000)
    with pytest.raises(torch.OutOfMemoryError, match="MPS backend out of memory"):
        device.allocate(3_000_000)
    gpu.take = lambda _nbytes: int("x")  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ValueError, match="invalid literal"):
        device.allocate(100)


def test_what_the_heaps_take(gpu: StandIn, device: MpsDevice) -> None:
    """As many of a size as fit one; large ones have their own."""
    sizes = [0, 1, 1 << 20, 3 << 20, 100 << 20, 400 << 20, (513 << 20) + 1]
    assert [device.takes(nbytes) for nbytes in sizes] == [
        0,
        16 << 10,
        1 << 20,
        (32 << 20) // 10,
        (1 << 30) // 10,
        512 << 20,
        514 << 20,
    ]
    assert device.slack_bytes > (1 << 30) + (40 << 20)
