"""What is asked of torch's accelerators, by a torch that only writes it down.

No card is needed, so none is proved to do it: that is what tests/gpu is for.
"""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipeload
from pipeload.devices import open_device as devices_open_device
from pipeload.devices import torch_accelerator
from pipeload.devices.open_device import open_device
from pipeload.devices.torch_accelerator import TorchDevice
from tests.support.streaming import load_streamed


class Recorded:
    """A torch of one kind of accelerator, whose memory is the host's."""

    def __init__(self, kind: str | None, count: int = 2) -> None:
        self.calls: list[str] = []
        self.fraction = [0.75]
        self.status = 0
        there = None if kind is None else SimpleNamespace(type=kind)
        self.accelerator = SimpleNamespace(
            is_available=lambda: there is not None,
            current_accelerator=lambda: there,
            current_device_index=lambda: 1,
            device_count=lambda: count,
            device_index=lambda _index: contextlib.nullcontext(),
            current_stream=lambda _where: Stream(self, "compute"),
            synchronize=lambda _where: self.calls.append("synchronize"),
            memory_allocated=lambda _where: 10,
            memory_reserved=lambda _where: 20,
            max_memory_reserved=lambda _where: 30,
            get_memory_info=lambda _where: (600, 1000),
            empty_cache=lambda: self.calls.append("empty_cache"),
        )
        runtime = SimpleNamespace(
            cudaHostRegister=self._register,
            cudaHostUnregister=self._unregister,
        )
        self.capability = (9, 0)
        self.cuda = SimpleNamespace(
            cudart=lambda: runtime, get_device_capability=lambda _where: self.capability
        )
        self.version = SimpleNamespace(hip=None)

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(f"register {address} {nbytes} {flags}")
        return self.status

    def _unregister(self, address: int) -> int:
        self.calls.append(f"unregister {address}")
        return 0

    def Stream(self, **_which: Any) -> Stream:  # noqa: N802 - as torch calls it
        return Stream(self, "copies")

    def get_device_module(self, _where: torch.device) -> Any:
        return SimpleNamespace(
            get_per_process_memory_fraction=lambda _where: self.fraction[-1],
            set_per_process_memory_fraction=lambda share, _where: self.fraction.append(share),
        )

    def ones(self, shape: Any, **_options: Any) -> torch.Tensor:
        self.calls.append("ones")
        return torch.ones(shape)

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class RecordedEvent:
    name = ""
    _torch: Recorded

    def __init__(self, device: torch.device) -> None:
        self.looks = 0

    def record(self, stream: Stream) -> None:
        self.name, self._torch = stream.name, stream.torch
        self._torch.calls.append(f"{stream.name} records")

    def query(self) -> bool:
        """Passed when asked for the fourth time."""
        self.looks += 1
        return self.looks > 3


class Stream:
    stream_id, device_index, device_type = 3, 0, 1

    def __init__(self, torch_: Recorded, name: str) -> None:
        self.torch, self.name = torch_, name
        self.entered = False

    def wait_event(self, event: RecordedEvent) -> None:
        self.torch.calls.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.torch.calls.append(f"{self.name} synchronized")

    def __enter__(self) -> None:
        assert not self.entered, "what is saved for leaving it lies in the object"
        self.entered = True
        self.torch.calls.append(f"enter {self.name}")

    def __exit__(self, *_error: object) -> None:
        self.entered = False
        self.torch.calls.append(f"leave {self.name}")


def install(made: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of torch, with no device opened so far."""
    monkeypatch.setattr(made, "Event", RecordedEvent, raising=False)
    monkeypatch.setattr(devices_open_device, "torch", made)
    monkeypatch.setattr(torch_accelerator, "torch", made)
    monkeypatch.setattr(devices_open_device, "_opened", {})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded("cuda")
    install(made, monkeypatch)
    return made


def opened(name: str) -> TorchDevice:
    device = open_device(name)
    assert device is not None
    return device


# -- names -----------------------------------------------------------------------------------------


def test_names_of_devices(fake: Recorded) -> None:
    """With an index or the current one; each device is opened once."""
    assert opened("cuda").where == torch.device("cuda", 1)
    assert opened("cuda:0").where == torch.device("cuda", 0)
    assert opened("auto") is opened("cuda:1")
    assert open_device(torch.device("cuda", 1)) is opened("cuda")
    assert open_device("cpu") is None


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cuda:-1", "auto:0", "cpu:0:1", "meta"])
def test_names_that_mean_nothing(name: str) -> None:
    """What, and what would."""
    with pytest.raises(pipeload.OptionError, match=r"is unknown\. Choose one of auto, cpu, cuda"):
        open_device(name)


@pytest.mark.parametrize("kind", [None, "xpu"])
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """It says what torch finds, and what to do; "auto" is the CPU then."""
    install(Recorded(kind), monkeypatch)
    with pytest.raises(pipeload.OptionError, match=r"'cuda' is not there: torch .* finds .*leave"):
        open_device("cuda")
    if kind is None:
        assert open_device("auto") is None


def test_an_index_that_is_not_there(fake: Recorded) -> None:
    """The highest is named."""
    with pytest.raises(pipeload.OptionError, match=r"finds 2 of 'cuda'.*cuda:0 to cuda:1"):
        open_device("cuda:2")


def test_options_of_a_device_alone(tiny: Any, fake: Recorded) -> None:
    """Each is refused where it would do nothing."""
    with pytest.raises(pipeload.OptionError, match="is for models on another device"):
        pipeload.plan(tiny("llama"), host_memory_limit="2GB")
    with pytest.raises(pipeload.OptionError, match="pressure='auto' gives weights back"):
        pipeload.from_pretrained(tiny("llama"), device="cuda", pressure="auto")


def test_another_limit_of_the_host_alone(tiny: Any) -> None:
    """On the CPU there is only one."""
    model = load_streamed(tiny("llama"))
    with pytest.raises(pipeload.OptionError, match="on the CPU, memory_limit is the host's"):
        model.pipeload.set_memory_limit("8GB", host_memory_limit="4GB")


# -- what is asked of it ---------------------------------------------------------------------------


def test_copies_go_behind_their_event(fake: Recorded) -> None:
    """On a stream of their own; nobody waits for it."""
    device = opened("cuda")
    fake.calls.clear()
    computed = device.computed()
    to, values = torch.zeros(4, dtype=torch.uint8), torch.arange(4, dtype=torch.uint8)
    event = device.copy([(to, values)], computed)
    device.wait(event)
    assert fake.calls == [
        "compute records",
        "copies waits for compute",
        "enter copies",
        "leave copies",
        "copies records",
        "compute waits for copies",
    ]
    assert torch.equal(to, values)
    device.copy([], None)
    assert fake.calls[-3:] == ["enter copies", "leave copies", "copies records"]


def test_who_waits_for_an_event_sleeps(fake: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer and longer: torch's own way would take a core."""
    event = opened("cuda").computed()
    pauses: list[float] = []
    monkeypatch.setattr("pipeload.devices.torch_accelerator.time.sleep", pauses.append)
    event.synchronize()
    assert len(pauses) == 3
    assert 0 < pauses[0] < pauses[1] < pauses[2] < 0.01


def test_threads_copy_at_once(fake: Recorded) -> None:
    """Readers, and dispatchers of several models: nobody is in the other's stream object."""
    device = opened("cuda")

    class Copied:
        def copy_(self, _values: object, **_options: object) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(device.copy, [], None).result()

    pair: Any = Copied(), None
    device.copy([pair], None)
    assert fake.calls[-6:-2] == ["enter copies", "enter copies", "leave copies", "copies records"]


def test_what_is_loaded_once_is_waited_for(fake: Recorded) -> None:
    """On the thread's own stream."""
    device = opened("cuda")
    to = torch.zeros(4, dtype=torch.uint8)
    device.copy_now(to, torch.ones(4, dtype=torch.uint8))
    assert to.sum() == 4
    assert fake.calls[-1] == "compute synchronized"


def test_memory_is_locked_at_its_exact_size(fake: Recorded) -> None:
    """Registered with the driver, and let go when nothing is copied any more."""
    device = opened("cuda")
    assert device.pin(4096, 12288)
    assert fake.calls[-1] == "register 4096 12288 0"
    device.unpin(4096)
    assert fake.calls[-2:] == ["synchronize", "unregister 4096"]
    assert not device.pin(4096, 0)


def test_a_refused_lock_is_recovered_and_said_once(
    fake: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's error does not stay behind; copies are then pageable."""
    device = opened("cuda")
    fake.status = 2
    with caplog.at_level(logging.WARNING, logger="pipeload"):
        assert not device.pin(4096, 1_000_000)
        assert not device.pin(4096, 1_000_000)
    assert "ones" in fake.calls
    (record,) = caplog.records
    assert "refused to lock 1.00 MB of host memory (error 2)" in record.message
    assert "ulimit -l" in record.message


def test_no_lock_where_torch_shows_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other accelerators than CUDA and ROCm."""
    made = Recorded("xpu")
    install(made, monkeypatch)
    assert not opened("xpu").pin(4096, 4096)


def test_the_allocators_figures_and_its_limit(fake: Recorded) -> None:
    """In bytes, and as a share of what the device has."""
    device = opened("cuda")
    figures = device.allocated_bytes(), device.reserved_bytes(), device.peak_bytes()
    assert figures == (10, 20, 30)
    assert device.free_bytes() == 600
    assert device.caps
    for limit in (250, 5000, None):
        device.cap(limit)
    assert fake.fraction[1:] == [0.25, 0.75, 0.75], "more than the user's own limit"
    device.trim()
    assert fake.calls[-1] == "empty_cache"
    assert device.allocate(100).shape == (100,)
    assert [device.takes(n) for n in (0, 1, 600, 8 << 20, 11 << 20, 12 << 20)] == [
        0,
        512,
        1024,
        10 << 20,
        12 << 20,
        12 << 20,
    ]


def test_attention_without_a_kernel(fake: Recorded) -> None:
    """In bf16, on NVIDIA's cards before Ampere; no other maker's are counted as these are."""
    device = opened("cuda")
    assert device.fuses_attention(torch.bfloat16)
    fake.capability = (7, 5)
    assert not device.fuses_attention(torch.bfloat16)
    assert device.fuses_attention(torch.float16)
    fake.version.hip = "6.4"
    assert device.fuses_attention(torch.bfloat16)


def test_rates_where_there_is_no_room_to_measure(
    fake: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They bind nothing, and are measured later."""
    device = opened("cuda")

    def refuse(*_args: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as full:
        full.setattr(fake, "empty", refuse, raising=False)
        full.setattr(fake, "ones", refuse, raising=False)
        assert device.link_rate() is device.compute_rate() is None
    for verb in ("register", "unregister"):
        assert sum(call.startswith(f"{verb} ") for call in fake.calls) == 0, "memory stays locked"
    assert (device.link_rate() or 0) > 0
    assert (device.compute_rate() or 0) > 0


def test_the_users_own_fraction_is_asked_for_anew(fake: Recorded) -> None:
    """He may set another one while no model streams there."""
    device = opened("cuda")
    for limit in (250, None):
        device.cap(limit)
    fake.fraction.append(0.5)
    for limit in (600, None):
        device.cap(limit)
    assert fake.fraction[-2:] == [0.5, 0.5]


def test_a_process_that_has_computed_takes_on_less(fake: Recorded) -> None:
    """Most kernels are loaded by then, and counted with what it holds."""
    device = opened("cuda")
    fresh = device.host_slack_bytes
    for _ in range(torch_accelerator._WARM_BLOCKS):
        device.computed()
    assert 0 < device.host_slack_bytes < fresh


def test_two_threads_open_one_device(fake: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one account."""
    warm_up = TorchDevice.warm_up

    def slow(device: TorchDevice) -> None:
        time.sleep(0.05)
        warm_up(device)

    monkeypatch.setattr(TorchDevice, "warm_up", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(opened, ["cuda", "cuda"])
    assert first is second


def test_the_products_rate_is_measured_once(
    fake: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the device waited for before the clock is looked at."""
    monkeypatch.setattr(torch_accelerator, "_PRODUCT_SIDE", 64)
    device = opened("cuda")
    fake.calls.clear()
    rate = device.compute_rate()
    assert rate is not None
    assert fake.calls[-1] == "synchronize"
    fake.calls.clear()
    assert device.compute_rate() == rate
    assert fake.calls == []


def test_the_links_rate_is_measured_once(fake: Recorded) -> None:
    """By copies out of locked memory, which is let go."""
    device = opened("cuda")
    rate = device.link_rate()
    assert rate is not None
    assert device.link_rate() == rate
    assert sum(call.startswith("register") for call in fake.calls) == 1
    assert sum(call.startswith("unregister") for call in fake.calls) == 1
