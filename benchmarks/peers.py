"""psrl_sglang beside what others offer for the same: stock SGLang, HiCache, LMCache's backend, sglang-fs-linker.

    python benchmarks/peers.py [--quick] [--only NAME …] [--lmcache DIR] [--lmbenchmark DIR] [--json FILE]

Every server runs the same model and the same prompts, one after the other in one run, on a device pool too small
for them. Three workloads:

sessions: agent sessions of many turns, several at a time, no update. Time to first token at the client, prompt
    tokens that the replies report as cached, by where they came from, and those computed.
updates: the same with new weights while requests run. Stale tokens by the client's rule (docs/demo.md), updates
    that failed, and answers that differ from those of an engine that never had other weights.
load: chats from two load generators that others made, with what they report.

Seconds are of this machine; compare the ratios to stock SGLang, which is in the same run. What could not be run is
a row that says why.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from peers_load import FULL, QUICK, LMBenchmark, LMCacheBench, Load, Report, prefilled_tokens
from peers_report import Figure, Result, against_stock, table
from peers_servers import ENV, PEERS, POOL_TOKENS, Crashed, NotRun, Peer, Stand
from results import at_most, write_rows

from psrl_sglang.lab.demo import LIMITS
from psrl_sglang.lab.demo_check import Comparison, compare
from psrl_sglang.lab.demo_request import Leg, RequestFailed
from psrl_sglang.lab.demo_run import ColumnRun, Scene, Workload
from psrl_sglang.lab.demo_trainer import Trainer, TrainerError
from psrl_sglang.lab.models import make_model
from psrl_sglang.lab.servers import Server, ServerError
from psrl_sglang.lab.sessions import CODING_AGENT, generate_sessions, quantile
from psrl_sglang.lab.zygote import Zygote, ZygoteError

WORKLOADS = ("sessions", "updates", "load")
_NEVER = 10**6  # turns between updates
_PLAY_TIMEOUT_S = 300.0
_TRIES = 2  # of a server that fails while it is measured
_ABORTS = 5  # of an update that cannot flush
_GO_ON_S = 0.1
_WARM_PROMPT = tuple(range(3, 99))
_FAILURES = (ServerError, ZygoteError, RequestFailed, TrainerError, httpx.HTTPError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of it; ``at_once`` sessions run at a time."""

    preset: str
    sessions: int
    at_once: int
    turns_per_update: int
    compared_answers: int  # of each server
    load: Load


FULL_PLAN = Plan(preset="bench", sessions=12, at_once=6, turns_per_update=24, compared_answers=16, load=FULL)
QUICK_PLAN = Plan(preset="tiny", sessions=5, at_once=5, turns_per_update=12, compared_answers=8, load=QUICK)


@dataclass
class _TieredTrainer(Trainer):
    """Flushes at an update, and does not take it for granted that nothing is left behind the device then.

    The client's ledger forgets everything when a trainer flushes. Where there are tiers it must not: what a reply
    reports as cached after the flush was not flushed, and it is as old as when it was last computed.

    SGLang does not flush while a copy to or from a tier is under way, and a paused engine never notices that one
    has ended. So where retracting was not enough this trainer aborts what runs, and where that is not enough either
    it lets the engine go on for a moment and aborts again.
    """

    mode: str = ""

    async def _install(self) -> bool:
        self.flush = True
        try:
            if await super()._install():
                return True
            return self.mode == "retract" and await self._abort_and_install()
        finally:
            self.flush = False

    async def _abort_and_install(self) -> bool:
        await self._pause("abort")
        for _ in range(_ABORTS):
            if await super()._install():
                return True
            self.is_paused = False
            await self._post("/continue_generation", {})
            await asyncio.sleep(_GO_ON_S)
            await self._pause("abort")
            self.is_paused = True
        return await super()._install()

    async def _pause(self, mode: str) -> None:
        self.mode = mode
        await super()._pause(mode)


@dataclass(frozen=True, slots=True)
class _Bench:
    stand: Stand
    plan: Plan
    peers: Sequence[Peer]
    packages: Path | None
    repository: Path | None

    def sessions(self) -> Iterator[Result]:
        def play(peer: Peer) -> tuple[Figure, ...]:
            return _of_sessions(self._play("sessions", peer, self._scene(_NEVER)))

        return (self._result("sessions", peer, play) for peer in self.peers)

    def updates(self) -> Iterator[Result]:
        """All are played first, and their answers compared with two fresh engines at the end."""
        played: dict[str, ColumnRun] = {}
        results: list[Result] = []

        def play(peer: Peer) -> tuple[Figure, ...]:
            played[peer.key] = self._play("updates", peer, self._scene(self.plan.turns_per_update))
            return (*_of_sessions(played[peer.key]), *_of_updates(peer, played[peer.key]))

        for peer in self.peers:
            results.append(self._result("updates", peer, play))
        _say("updates: comparing answers with fresh engines")
        legs = {key: _some(run.outcome.legs, self.plan.compared_answers) for key, run in played.items()}
        compared = compare(legs, self.stand.reference, weights=len(self.stand.models), on_progress=_silent)
        for result in results:
            if result.why:
                yield result
            else:
                answers = _of_answers(result.peer, compared[result.peer.key])
                yield replace(result, figures=(*result.figures, *answers))

    def lmcache_bench(self) -> Iterator[Result]:
        return self._load(LMCacheBench.name, lambda: LMCacheBench(self.packages))

    def lmbenchmark(self) -> Iterator[Result]:
        return self._load(LMBenchmark.name, lambda: LMBenchmark(self.repository))

    def _load(self, name: str, make: Callable[[], LMCacheBench | LMBenchmark]) -> Iterator[Result]:
        def generate(peer: Peer) -> tuple[Figure, ...]:
            generator = make()
            with self.stand.serving(peer, name) as server:
                _warm(server)
                folder = Path(tempfile.mkdtemp(prefix="client-", dir=self.stand.directory))
                report = generator.report(server, self.plan.load, folder)
                return _of_load(report, prefilled_tokens(server))

        return (self._result(name, peer, generate) for peer in self.peers)

    def _play(self, name: str, peer: Peer, scene: Scene) -> ColumnRun:
        drawn = generate_sessions(CODING_AGENT, self.plan.sessions, seed=1, limits=LIMITS)
        with self.stand.serving(peer, name) as server:
            _warm(server)
            return asyncio.run(self._drive(peer, scene, Workload(drawn), server))

    async def _drive(self, peer: Peer, scene: Scene, workload: Workload, server: Server) -> ColumnRun:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            if peer.flush and peer.has_tiers:
                trainer = _TieredTrainer(client, self.stand.models, flush=False)
            else:
                trainer = Trainer(client, self.stand.models, peer.flush)
            run = ColumnRun(peer.column(scene), workload, trainer, client, on_progress=_silent)
            await run.run(timeout_s=_PLAY_TIMEOUT_S)
            return run

    def _scene(self, turns_per_update: int) -> Scene:
        return Scene("", self.plan.at_once, turns_per_update, POOL_TOKENS, pause_scale=1 / 20, is_of_tiers=True)

    def _result(self, workload: str, peer: Peer, measure: Callable[[Peer], tuple[Figure, ...]]) -> Result:
        if workload != "updates" and peer.same_without_updates:
            same = f"without updates it is the same server as {peer.same_without_updates}"
            return Result(workload, peer, why=same)
        _say(f"{workload}: {peer.title}")
        whys: list[str] = []
        while len(whys) < _TRIES:
            try:
                figures = measure(peer)
                return Result(workload, peer, (*figures, Figure("failed tries before", len(whys), "count")))
            except NotRun as error:
                return Result(workload, peer, why=str(error))
            except Crashed as error:
                whys.append(f"the server crashed: {error}")
            except _FAILURES as error:
                whys.append(self._said(error))
            except ExceptionGroup as group:
                whys.append(self._said(_first(group)))
            _say(f"{workload}: {peer.title}: {whys[-1]}")
        why = f"failed {_TRIES} times of {_TRIES}: {'; '.join(dict.fromkeys(whys))}"
        return Result(workload, peer, why=why, has_failed=True)

    def _said(self, error: BaseException) -> str:
        return (
            f"{type(error).__name__}: {self.stand.reason(str(error))}" if str(error) else type(error).__name__
        )


def _of_sessions(run: ColumnRun) -> tuple[Figure, ...]:
    outcome = run.outcome
    ordered = sorted(outcome.ttft_s)
    return (
        Figure("TTFT p50", quantile(ordered, 0.5) * 1e3, "ms"),
        Figure("TTFT p99", quantile(ordered, 0.99) * 1e3, "ms"),
        Figure("prompt tokens", outcome.prompt_tokens, "tokens"),
        Figure("cached", 100 * outcome.hit_rate, "%"),
        Figure("from device", outcome.device_tokens, "tokens"),
        Figure("from host", outcome.dram_tokens, "tokens"),
        Figure("from storage", outcome.disk_tokens, "tokens"),
        Figure("computed", outcome.computed_tokens, "tokens"),
        Figure("prefilled by the engine", outcome.engine_prefill_tokens, "tokens"),
    )


def _of_updates(peer: Peer, run: ColumnRun) -> tuple[Figure, ...]:
    outcome, trainer = run.outcome, run.trainer
    none = at_most(0) if peer.is_psrl else None
    stale = max(outcome.client_stale_tokens, outcome.stale_tokens)
    return (
        Figure("updates", trainer.syncs.total(), "count"),
        Figure("failed updates", trainer.failed_flushes + trainer.failed_updates, "count", none),
        Figure("an update takes, mean", 1e3 * sum(trainer.update_s) / max(len(trainer.update_s), 1), "ms"),
        Figure("stale tokens served", stale, "tokens", none),
    )


def _of_answers(peer: Peer, compared: Comparison) -> tuple[Figure, ...]:
    none = at_most(0) if peer.is_psrl else None
    return (
        Figure("answers compared", compared.compared, "count"),
        Figure("answers off", compared.beyond_tolerance, "count", none),
        Figure("worst logprob difference", compared.worst, "nats"),
    )


def _of_load(report: Report, prefilled: int) -> tuple[Figure, ...]:
    return (
        Figure("requests", report.requests, "count"),
        Figure("TTFT mean", report.ttft_mean_ms, "ms"),
        Figure("TTFT p50", report.ttft_p50_ms, "ms"),
        Figure("TTFT p99", report.ttft_p99_ms, "ms"),
        Figure("input", report.input_tokens_per_s, "tokens/s"),
        Figure("output", report.output_tokens_per_s, "tokens/s"),
        Figure("prefilled by the engine", prefilled, "tokens"),
    )


def _some(legs: Sequence[Leg], count: int) -> list[Leg]:
    """``count`` of the answers that no update crossed, evenly over the run."""
    whole = [leg for leg in legs if not leg.crossed and leg.logprobs]
    if len(whole) <= count:
        return whole
    return [whole[number * len(whole) // count] for number in range(count)]


def _warm(server: Server) -> None:
    """The first forward of a process is slow; it is nobody's."""
    server.generate(_WARM_PROMPT, 4)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _silent(*_: object) -> None:
    pass


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> Iterator[list[Result]]:
    """The results of every chosen workload, as soon as it has ended."""
    chosen = options.only or ()
    peers = [peer for peer in PEERS if peer.key in chosen] or list(PEERS)
    workloads = [name for name in WORKLOADS if name in chosen] or list(WORKLOADS)
    plan = QUICK_PLAN if options.quick else FULL_PLAN
    os.environ.update(ENV)
    with tempfile.TemporaryDirectory(prefix="psrl-peers-") as folder:
        directory = Path(folder)
        models = [make_model(directory / f"model-{seed}", seed=seed, preset=plan.preset) for seed in (1, 2)]
        with Zygote(log_path=directory / "zygote.log") as zygote:
            stand = Stand(directory, models, zygote, options.lmcache)
            bench = _Bench(stand, plan, peers, options.lmcache, options.lmbenchmark)
            parts = {
                "sessions": (bench.sessions,),
                "updates": (bench.updates,),
                "load": (bench.lmcache_bench, bench.lmbenchmark),
            }
            for workload in workloads:
                for part in parts[workload]:
                    yield against_stock(list(part()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all of it runs")
    names = (*WORKLOADS, *(peer.key for peer in PEERS))
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--lmcache", type=Path, metavar="DIR", help="the folder tests/lmcache/install.sh filled"
    )
    parser.add_argument("--lmbenchmark", type=Path, metavar="DIR", help="a checkout of LMCache/LMBenchmark")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    for name in ("lmcache", "lmbenchmark"):
        if (path := getattr(options, name)) is not None:
            setattr(options, name, path.resolve())
    results: list[Result] = []
    for part in run(options):
        print(f"\n{part[0].workload}\n\n{table(part)}", flush=True)
        results += part
        if options.json is not None:
            write_rows(options.json, [row for result in results for row in result.rows()])
    return int(any(result.has_failed and result.peer.is_psrl for result in results))


if __name__ == "__main__":
    sys.exit(main())
