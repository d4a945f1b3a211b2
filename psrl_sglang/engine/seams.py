"""The places in SGLang this plugin holds on to, and the proof that they are what it was written for.

Each file of ``psrl_sglang/patches/`` describes one seam: target, signature, who needs it, why, and what to do
when upstream changes. All are checked in the launcher before weights load, and again in every engine process
once the hooks are in place; a missing or different seam ends the process.
"""

from __future__ import annotations

import inspect
import pkgutil
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from psrl_sglang.engine.activation import refuse

Kind = Literal["around", "before", "after", "call", "data"]
_HOOKED: tuple[Kind, ...] = ("around", "before", "after")


@dataclass(frozen=True, slots=True)
class Seam:
    """One target in SGLang. ``signature`` is ``inspect.signature`` without annotations; for ``data`` it is
    the type's name. ``side`` is the process that uses it."""

    name: str
    target: str
    kind: Kind
    side: Literal["launcher", "http", "scheduler"]
    signature: str
    why: str
    when_it_changes: str

    def found(self) -> str:
        """What SGLang has at ``target`` now, in the form of ``signature``; "missing" if nothing."""
        try:
            target = pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError):
            return "missing"
        return type(target).__name__ if self.kind == "data" else plain_signature(target)


def plain_signature(function: Callable[..., Any]) -> str:
    """The signature with parameter names, kinds and defaults; annotations do not matter to a caller."""
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty, default=_plain_default(p.default))
        for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _plain_default(default: Any) -> Any:
    # The repr of anything but a literal has an address in it.
    plain = isinstance(default, str | int | float | bool | None | tuple) or default is inspect.Parameter.empty
    return default if plain else type(default).__name__


def load_seams() -> tuple[Seam, ...]:
    """Every seam in ``psrl_sglang/patches/``, by file name."""
    folder = resources.files("psrl_sglang") / "patches"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return tuple(Seam(name=f.name.removesuffix(".toml"), **tomllib.loads(f.read_text())) for f in files)


def problems(seams: Sequence[Seam]) -> list[str]:
    """One line for each seam that is not as expected: its name, the expected and the found signature."""
    found = [(seam, seam.found()) for seam in seams]
    return [
        f"seam {seam.name} ({seam.target}): expected {seam.signature}, found {now}"
        for seam, now in found
        if now != seam.signature
    ]


def verify(seams: Sequence[Seam], patched: frozenset[str] | None = None) -> None:
    """End the process unless every seam is as expected and, where ``patched`` names the hooked targets of
    this process, every seam that must be hooked here is."""
    wrong = problems(seams)
    if patched is not None:
        wrong += [
            f"seam {seam.name} ({seam.target}): expected our {seam.kind} hook, found none"
            for seam in seams
            if seam.kind in _HOOKED and seam.target not in patched
        ]
    if wrong:
        import sglang

        lines = "\n  ".join(wrong)
        refuse(
            f"SGLang {sglang.__version__} is not the SGLang this plugin was written for:\n  {lines}\n"
            "  Install sglang==0.5.23, or a psrl-sglang release for your version; patches/ says what each "
            "seam is for. Serving without one of them could answer from KV of other weights."
        )
