"""`psrl-sglang doctor --gpu`: what an engine does between a device and DRAM, tried without a model or a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from psrl_sglang.doctor.result import CheckResult, any_failed, fail, ok, skip, slow, warn, wrong
from psrl_sglang.doctor.runner import Check, run_in_order

if TYPE_CHECKING:
    import torch

    from psrl_sglang.engine.selftest import Bandwidth, Difference

_GB = 1e9
_MIB = 1 << 20
_IMPORT_S = 240.0
_CHECK_S = 180.0
_LOCKED_BYTES = 512 * _MIB
_LEAST_OF_PLAIN = 0.6
_MOST_OF_LONGER = 1.25
_REPORT = "do not use the tiers on this device, and report it with this output: psrl.lmcache.enable: false"
_NOT_HERE = "not applicable: the pools of a CPU are host memory"


class NoSuchDeviceError(Exception):
    """``result`` says what was looked for, what there is, and what to do."""

    def __init__(self, result: CheckResult) -> None:
        super().__init__(result.found)
        self.result = result


def find_device(name: str) -> torch.device:
    """``cpu``, ``cuda`` or ``cuda:N``. Raises ``NoSuchDeviceError``."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _no_device(f"{name!r} is no device: {str(error).splitlines()[0]}", "--device cuda:0") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise _no_device(f"looked for {name}, and this test knows only cuda and cpu", "--device cuda:0")
    if torch.version.cuda is None:
        kind = "ROCm, which has not been tried" if torch.version.hip else "the CPU alone"
        raise _no_device(
            f"looked for {name}, and torch {torch.__version__} is built for {kind}",
            "a torch that is built for CUDA",
        )
    there = torch.cuda.device_count()
    index = device.index or 0
    if index < there:
        return torch.device("cuda", index)
    if there:
        names = ", ".join(f"cuda:{one} ({torch.cuda.get_device_name(one)})" for one in range(there))
        raise _no_device(
            f"looked for cuda:{index}, and there are {names}", "one of these, and CUDA_VISIBLE_DEVICES"
        )
    raise _no_device(
        f"looked for cuda:{index}, and torch {torch.__version__} sees none: {_why_none()}; CUDA_VISIBLE_DEVICES is "
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}",
        "NVIDIA's driver on the host (nvidia-smi shows it), `docker run --gpus all` in a container; --device cpu "
        "tries everything but the device",
    )


def try_device(device: torch.device) -> list[CheckResult]:
    """All results, in order. The rest is not run if there is no SGLang whose pools could be tried."""
    if device.type == "cpu":
        os.environ.setdefault("SGLANG_PLATFORM", "psrl_cpu")  # read when SGLang is imported
    first = [Check("device", partial(_facts, device)), Check("sglang", _sglang, _IMPORT_S)]
    results = run_in_order(first)
    return results if any_failed(results) else results + run_in_order(_checks(device))


def _checks(device: torch.device) -> list[Check]:
    checks = {
        "page-locked memory": _page_lock,
        "round trip": _round_trip,
        "layer order": _layer_order,
        "overlap": _overlap,
        "bandwidth": _bandwidth,
    }
    return [Check(name, partial(_on, device, check), _CHECK_S) for name, check in checks.items()]


def _on(device: torch.device, check: Callable[[torch.device], list[CheckResult]]) -> list[CheckResult]:
    import torch

    if device.type == "cpu":
        return check(device)
    with torch.cuda.device(device):  # a thread's is number 0
        return check(device)


def _no_device(found: str, remedy: str) -> NoSuchDeviceError:
    return NoSuchDeviceError(fail("device", found, remedy))


def _why_none() -> str:
    import torch

    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).splitlines()[0].split(". ")[0]
    return "no reason is given"


def _facts(device: torch.device) -> list[CheckResult]:
    import torch

    from psrl_sglang.platforms.device import CudaError, cuda_runtime

    built = f"torch {torch.__version__}"
    if device.type == "cpu":
        return [ok("device", f"cpu, {torch.get_num_threads()} threads; {built}")]
    about = torch.cuda.get_device_properties(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    said = (
        f"{device}: {about.name}, compute capability {about.major}.{about.minor}, {free_bytes / 2**30:.1f} of "
        f"{total_bytes / 2**30:.1f} GiB free; {built} for CUDA {torch.version.cuda}"
    )
    try:
        return [ok("device", f"{said}, the driver knows CUDA {cuda_runtime().driver_version()}")]
    except CudaError as error:
        return [warn("device", f"{said}; {error}", "memory is not page-locked without it")]


def _sglang() -> list[CheckResult]:
    """Import what the other checks need: here, where it may take its time."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("sglang")
    except PackageNotFoundError:
        return [
            fail("sglang", "not installed here, and its pools are what is tried", "pip install sglang==0.5.23")
        ]
    try:
        import psrl_sglang.engine.selftest  # noqa: F401
    except ImportError as error:
        return [fail("sglang", f"{found}, which cannot be imported: {error}", "pip install sglang==0.5.23")]
    return [ok("sglang", found)]


def _page_lock(device: torch.device) -> list[CheckResult]:
    from psrl_sglang.engine import selftest

    name = "page-locked memory"
    if device.type == "cpu":
        return [skip(name, _NOT_HERE)]
    size = f"{_LOCKED_BYTES / _MIB:.0f} MiB"
    error = selftest.page_lock_error(device, _LOCKED_BYTES)
    if error is not None:
        text = f"{size} could not be locked, so copies go through a buffer: {error.why}"
        return [slow(name, text, error.remedy)]
    return [ok(name, f"{size} were locked: an engine's DRAM will be, if there is as much as it asks for")]


def _paths(device: torch.device) -> Iterator[tuple[str, str]]:
    """The ways of copying, and why one cannot be tried."""
    from psrl_sglang.engine import selftest

    for path in selftest.paths(device):
        needs_lock = path == selftest.PAGE_LOCKED and device.type != "cpu"
        error = selftest.page_lock_error(device, 16 * _MIB) if needs_lock else None
        yield path, "" if error is None else error.why


def _round_trip(device: torch.device) -> list[CheckResult]:
    from psrl_sglang.engine import selftest
    from psrl_sglang.engine.selftest_pools import KINDS

    results = []
    for path, reason in _paths(device):
        name = f"round trip, {path}"
        if reason:
            results.append(skip(name, reason))
            continue
        differences = selftest.round_trip(device, path)
        if differences:
            results.append(wrong(name, "; ".join(_described(one) for one in differences[:4]), _REPORT))
        else:
            forms = "MHA with NHD and HND rows, MLA; float16, bfloat16, fp8, float32"
            results.append(
                ok(name, f"{len(KINDS)} kinds of pool ({forms}): every byte came back to other pages")
            )
    return results


def _described(one: Difference) -> str:
    return f"{one.kind}, layer {one.layer}: {one.pages} pages are wrong, the first is {one.first_page}"


def _layer_order(device: torch.device) -> list[CheckResult]:
    from psrl_sglang.engine import selftest

    results = []
    for path, reason in _paths(device):
        name = f"layer order, {path}"
        if reason:
            results.append(skip(name, reason))
            continue
        order = selftest.layer_order(device, path)
        if order.early_layers:
            text = f"layers {list(order.early_layers)} of {order.layers} were read before they had landed"
            results.append(wrong(name, text, _REPORT))
        elif not order.is_shown:
            text = "the load was over before anybody could have read too early: nothing was shown"
            results.append(fail(name, text, "again, while nothing else uses the device"))
        else:
            results.append(ok(name, f"{order.layers} layers, each held up: a reader waited for its own layer"))
    return results


def _overlap(device: torch.device) -> list[CheckResult]:
    from psrl_sglang.engine import selftest

    if device.type == "cpu":
        return [skip("overlap", "not applicable: copies and products of matrices share the cores")]
    path, reason = next(_paths(device))
    if reason:
        path = selftest.STAGED
    name = f"overlap, {path}"
    found = selftest.overlap(device, path, _LOCKED_BYTES)
    said = (
        f"load {found.load_s * 1e3:.1f} ms, products of matrices {found.compute_s * 1e3:.1f} ms, both "
        f"{found.both_s * 1e3:.1f} ms: {found.ratio:.2f} of the longer"
    )
    if found.ratio <= _MOST_OF_LONGER:
        return [ok(name, said)]
    return [slow(name, said, "nothing else on the device and its bus; page-locked memory")]


def _bandwidth(device: torch.device) -> list[CheckResult]:
    from psrl_sglang.engine import selftest

    size_bytes = 64 * _MIB if device.type == "cpu" else _LOCKED_BYTES
    results = []
    for path, reason in _paths(device):
        name = f"bandwidth, {path}"
        if device.type == "cpu" and path != selftest.DIRECT:
            reason = "not applicable: between two places in host memory it says nothing of a device"
        if reason:
            results.append(skip(name, reason))
            continue
        found = selftest.bandwidth(device, path, size_bytes)
        ratios = found.store / found.plain_store, found.load / found.plain_load
        said = _rates(found, ratios)
        if device.type == "cpu" or path == selftest.STAGED or min(ratios) >= _LEAST_OF_PLAIN:
            results.append(ok(name, said))
        else:
            text = f"{said}; {_LEAST_OF_PLAIN} are expected"
            results.append(
                slow(name, text, "nothing else on the bus; the host's memory nearest to the device (NUMA)")
            )
    return results


def _rates(found: Bandwidth, ratios: Sequence[float]) -> str:
    said = (
        f"{found.size_bytes / _MIB:.0f} MiB: store {found.store / _GB:.1f} GB/s, load {found.load / _GB:.1f} GB/s; "
        f"{ratios[0]:.2f} and {ratios[1]:.2f} of one plain copy"
    )
    if found.pageable_store is None or found.pageable_load is None:
        return said
    return (
        f"{said} of page-locked memory, {found.store / found.pageable_store:.2f} and "
        f"{found.load / found.pageable_load:.2f} of one of ordinary memory"
    )
