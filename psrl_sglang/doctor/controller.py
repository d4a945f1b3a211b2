"""The controller, as an engine here would find it, the clocks of whoever answers, and the pairs of its engines."""

from __future__ import annotations

import email.utils
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from psrl_sglang.doctor.pairs import check_pairs
from psrl_sglang.doctor.result import CheckResult, fail, ok, skip, warn
from psrl_sglang.transfer.auth import CONTROLLER_TOKEN_VARIABLE, MAX_SKEW_S

CALL_S = 5.0
_DATE_ERROR_S = 2.0  # it has whole seconds, and the call takes some time
_MOST_CLOCKS = 16
_MOST_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class ControllerPorts:
    """Where workers report and ask; None where they are not known."""

    pull: int | None
    reply: int | None


def check_controller(url: str, token: str, ports: ControllerPorts) -> list[CheckResult]:
    name = "controller"
    try:
        with httpx.Client(base_url=url, timeout=CALL_S, trust_env=False) as client:
            health, results = client.get("/healthz"), []
            if health.status_code != 200 or health.text.strip() != "ok":
                text = f"{url} answers /healthz with {health.status_code}: it is no controller"
                return [fail(name, text, "is another process on controller_base_port?")]
            results.append(ok(name, f"{url} answers"))
            results.append(_clock("clock of the controller", health))
            headers = {"authorization": f"Bearer {token}"} if token else {}
            reply = client.get("/instances", headers=headers)
            results.append(_token(reply, token))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        text = f"{url}: {str(error)[:_MOST_MESSAGE] or type(error).__name__}"
        return [fail(name, text, "does it run, and with --host of an address that this host reaches?")]
    host = httpx.URL(url).host
    for port_name, port in (("controller_pull_port", ports.pull), ("controller_reply_port", ports.reply)):
        if port is not None:
            results.append(_listens(f"controller {port_name}", host, port))
    if reply.status_code != 200:
        return results
    try:
        instances = reply.json()["instances"]
    except (ValueError, KeyError, TypeError):
        return [
            *results,
            fail("instances", "the controller's answer is not understood", "one release on all hosts"),
        ]
    return [*results, *_instances(instances), *check_pairs(instances), *_clocks(instances)]


def _token(reply: httpx.Response, token: str) -> CheckResult:
    name = "controller token"
    if reply.status_code == 401:
        text = (
            f"the one of {CONTROLLER_TOKEN_VARIABLE} is not its token"
            if token
            else "it wants one, and none is set"
        )
        return fail(name, text, f"{CONTROLLER_TOKEN_VARIABLE}: what its --token-file holds, for every engine")
    if reply.status_code != 200:
        return fail(name, f"/instances: {reply.status_code} {reply.text[:_MOST_MESSAGE]}")
    return (
        ok(name, "it is taken")
        if token
        else warn(name, "none is wanted: whoever reaches it can move and clear KV")
    )


def _listens(name: str, host: str, port: int) -> CheckResult:
    try:
        socket.create_connection((host, port), timeout=CALL_S).close()
    except OSError as error:
        return fail(
            name, f"{host}:{port}: {error.strerror or error}", "the same ports in the settings of both sides"
        )
    return ok(name, f"{host}:{port} takes connections")


def _instances(instances: Sequence[dict[str, Any]]) -> list[CheckResult]:
    name = "instances"
    if not instances:
        return [
            warn(name, "none has registered", "controller_host and enable_p2p in the settings of the engines")
        ]
    ill = {one["instance_id"]: one["state"] for one in instances if one["state"] != "live"}
    if ill:
        said = ", ".join(f"{instance} is {state}" for instance, state in ill.items())
        return [
            warn(name, f"{len(instances)}, of which {said}", "are these processes up, and do they reach it?")
        ]
    return [ok(name, f"{len(instances)}, all live")]


def _clocks(instances: Sequence[dict[str, Any]]) -> list[CheckResult]:
    """By the HTTP side of each engine: signed messages of a clock that is off are refused."""
    results = []
    for one in instances[:_MOST_CLOCKS]:
        name, url = f"clock of {one['instance_id']}", one.get("http_url", "")
        if not url:
            results.append(skip(name, "it does not say where its HTTP side is"))
            continue
        try:
            reply = httpx.get(f"{url.rstrip('/')}/ping", timeout=CALL_S, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            results.append(skip(name, f"{url} is not reached from here: {type(error).__name__}"))
        else:
            results.append(_clock(name, reply))
    return results


def _clock(name: str, reply: httpx.Response) -> CheckResult:
    """Any answer will do, a refusal too: what counts is its date."""
    now_s = time.time()
    try:
        theirs_s = email.utils.parsedate_to_datetime(reply.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return skip(name, "it sends no date")
    skew_s = theirs_s - now_s
    if abs(skew_s) > MAX_SKEW_S - _DATE_ERROR_S:
        text = f"{skew_s:+.0f} s from ours: signed messages are refused from {MAX_SKEW_S:.0f} s on"
        return fail(name, text, "run an NTP client on both hosts")
    if abs(skew_s) > MAX_SKEW_S / 3:
        return warn(
            name, f"{skew_s:+.0f} s from ours; at most {MAX_SKEW_S:.0f}", "run an NTP client on both hosts"
        )
    return ok(name, f"within {max(abs(skew_s), _DATE_ERROR_S):.0f} s of ours")
