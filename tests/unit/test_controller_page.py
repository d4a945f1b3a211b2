"""The page in a real browser: what it shows, that moves appear as they happen, and that names stay text.

Needs Chromium (Debian's package `chromium`, or what CHROMIUM names).
"""

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from controller_support import FakeWorker, RunningController, options, status

from psrl_sglang.transfer import messages as wire

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-port=0", "--window-size=1360,1200"),
)
TOKEN = "a-token-of-the-controller"
GIB = 1 << 30

pytestmark = pytest.mark.browser


class Page:
    """One tab, over the DevTools protocol."""

    def __init__(self, devtools: aiohttp.ClientWebSocketResponse) -> None:
        self._devtools = devtools
        self._numbers = itertools.count(1)
        self._session = ""

    async def open(self, url: str) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        await self.call("Page.navigate", url=url)

    async def call(self, method: str, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        await self._devtools.send_json(message | ({"sessionId": self._session} if self._session else {}))
        async with asyncio.timeout(20):
            while (answer := await self._devtools.receive_json()).get("id") != number:
                pass
        assert "error" not in answer, answer
        return answer["result"]

    async def evaluate(self, expression: str):
        return (await self.call("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get(
            "value"
        )

    async def until(self, expression: str) -> None:
        deadline = time.monotonic() + 15
        while not await self.evaluate(expression):
            text = await self.evaluate("document.body.innerText")
            assert time.monotonic() < deadline, f"{expression} does not come true; the page:\n{text}"
            await asyncio.sleep(0.05)

    async def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@contextmanager
def browser(profile: Path):
    if CHROMIUM is None:
        pytest.fail("no chromium: apt-get install chromium, or set CHROMIUM")
    log = (profile.parent / "chromium.log").open("wb")
    process = subprocess.Popen([CHROMIUM, *FLAGS, f"--user-data-dir={profile}"], stdout=log, stderr=log)
    try:
        told = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 30
        while not told.exists() or len(told.read_text().split()) < 2:
            assert process.poll() is None, "chromium has ended"
            assert time.monotonic() < deadline, "chromium is not up in 30 s"
            time.sleep(0.05)
        port, path = told.read_text().split()[:2]
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        log.close()


def in_browser(tmp_path, url, steps):
    async def main(devtools_url):
        async with (
            aiohttp.ClientSession(trust_env=False) as http,
            http.ws_connect(devtools_url, max_msg_size=0) as devtools,
        ):
            page = Page(devtools)
            await page.open(url)
            await steps(page)

    with browser(tmp_path / "profile") as devtools_url:
        asyncio.run(asyncio.wait_for(main(devtools_url), 60))


def text(selector: str) -> str:
    return f"(document.querySelector({selector!r})?.innerText ?? '')"


def test_the_page_shows_instances_and_moves_as_they_happen_and_names_stay_text(tmp_path):
    evil = "<img src=x onerror=\"document.title='broken in'\">"
    tiers = {"dram": (30 * GIB, 64 * GIB), "disk": (499 * GIB, 500 * GIB)}
    with (
        RunningController() as controller,
        FakeWorker(
            controller.ports, "rollout-0", told=status(tiers=tiers, pages_by_tag={"7": 51234})
        ) as worker,
        FakeWorker(controller.ports, evil, told=status(version=evil, window=[evil, "7"])) as other,
    ):
        worker.register()

        async def steps(page):
            await page.until(text("#link") + " === 'live'")
            await page.until(text("#instances") + ".includes('rollout-0')")
            shown = await page.evaluate(text("#instances"))
            assert "30.0 GiB / 64.0 GiB" in shown
            assert "51,234" in shown
            assert (
                await page.evaluate("document.querySelector('progress.full').title")
                == "disk: 499.0 GiB of 500.0 GiB"
            )
            assert "No moves yet." in await page.evaluate(text("#moves"))
            other.register()
            record = wire.MoveRecord(
                "rollout-0", evil, "7", 28672, 30208, 470 << 20, 0.2, "cma", evil, "s-1", 1.0
            )
            worker.push(wire.MovedMsg("rollout-0", 0, [record]))
            worker.push(wire.SessionsMsg("rollout-0", 0, [wire.SessionHeld(evil, 30208, "7")]))
            await page.until(text("#moves") + ".includes('28,672')")
            await page.until(text("#sessions") + ".includes('30,208')")
            await page.until("document.querySelectorAll('.card .name').length === 2")
            for part in ("#moves", "#instances", "#sessions"):
                assert evil in await page.evaluate(text(part))
            assert await page.evaluate("document.querySelectorAll('img').length") == 0
            assert await page.evaluate("document.title") == "psrl-sglang controller"
            overflow = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            assert not await page.evaluate(overflow)
            for scheme in ("light", "dark"):
                feature = [{"name": "prefers-color-scheme", "value": scheme}]
                await page.call("Emulation.setEmulatedMedia", features=feature)
                await page.screenshot(tmp_path / f"{scheme}.png")
                back = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (back == "rgb(18, 21, 27)") == (scheme == "dark")

        in_browser(tmp_path, controller.url + "/", steps)


def test_the_page_asks_for_the_token_and_comes_back_after_a_restart(tmp_path):
    controller = RunningController(options(token=TOKEN))
    ports = controller.ports

    async def steps(page):
        nonlocal controller
        await page.until("document.querySelector('#ask').open")
        await page.evaluate(f"document.querySelector('#token').value = {TOKEN!r}")
        await page.evaluate("document.querySelector('#ask button').click()")
        await page.until(text("#link") + " === 'live'")
        await page.until(text("#instances") + ".includes('No engine has registered yet.')")
        await asyncio.to_thread(controller.stop)
        await page.until(text("#link") + ".includes('no connection')")
        same = options(token=TOKEN, http_port=ports.http, pull_port=ports.pull, reply_port=ports.reply)
        controller = await asyncio.to_thread(RunningController, same)
        await page.until(text("#link") + " === 'live'")
        await page.evaluate("localStorage.clear()")
        await page.open(f"{controller.url}/#token={TOKEN}")
        await page.until(text("#link") + " === 'live'")
        assert await page.evaluate("location.hash") == ""

    try:
        in_browser(tmp_path, controller.url + "/", steps)
    finally:
        controller.stop()
