"""The page for people: one static file without anything from elsewhere, which asks for all it shows."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse


def add_page(app: FastAPI) -> None:
    text = files(__package__ or "psrl_sglang.controller").joinpath("page.html").read_text()
    headers = {
        "content-security-policy": _policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)


def _policy(text: str) -> str:
    """Only the page's own script and style run, whatever a worker calls itself."""
    hashes = {kind: _hash_of(kind, text) for kind in ("script", "style")}
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src '{hashes['script']}'; "
        f"style-src '{hashes['style']}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash_of(kind: str, text: str) -> str:
    found = re.search(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
    if found is None:
        raise ValueError(f"page.html has no <{kind}>")
    return "sha256-" + base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
