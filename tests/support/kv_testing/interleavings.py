"""Random interleavings of exact and blended requests, over tiers, with restarts of engines and servers in between."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from kv_blend import edited, request_fields
from kv_core.errors import InputError
from kv_server.process import ServerProcess, launch

from kv_testing.documents import FIRST, SECOND, SELECTIONS, Prompt
from kv_testing.peers import PATIENT
from kv_testing.servers import ValkeyServer, free_port

EXACT = [FIRST, SECOND, *(Prompt((at,)) for at in range(4)), Prompt((1, 0)), Prompt((3, 2, 1))]
"""The prompts that are drawn."""
SELECTS = {"vllm": ["first", "question"], "sglang": ["first"]}
Answer = TypeVar("Answer")
Ask = Callable[[Sequence[Prompt], Sequence[Mapping[str, Any]]], tuple[Sequence[Answer], Sequence[Any]]]
"""Asks an engine for prompts at once, each with its fields of `request_fields` or none. Returns the answers, and what
each says of its blending."""


@dataclass
class Seen:
    """wrong: exact requests that were, of how many. reused_tokens: of blended ones, what came from segments."""

    wrong: int = 0
    exact: int = 0
    reused_tokens: int = 0


def interleave(
    ask: Ask[Answer],
    exact: Mapping[Prompt, Answer],
    rounds: int,
    *,
    engine: Literal["vllm", "sglang"],
    forget: Callable[[], None],
    seed: int = 1,
    disturb: Callable[[bool], None] | None = None,
    forged: Mapping[str, Any] | None = None,
) -> Seen:
    """Each round asks at once for two to six requests, each of them exact or blended, as drawn.

    exact: what an engine without us answers. forget: empties the engine's own caches, now and then.
    disturb: does something to the servers, now and then while requests are under way; by force, if it is told so.
    forged: in place of fields of blended requests.
    """
    draw, seen = random.Random(seed), Seen()
    for number in range(rounds):
        asked: list[tuple[Prompt, Mapping[str, Any]]] = []
        for prompt in draw.choices(EXACT, k=draw.randint(2, 6)):
            plan: dict[str, Any] = {
                "share": draw.choice([0.0, 0.15]),
                **SELECTIONS[draw.choice(SELECTS[engine])],
                "behind": draw.choice(["prefix", "alone"]),
            }
            segments: dict[str, Any] = {"segments": prompt.segments, "tokens": len(prompt.tokens)}
            if draw.random() < 0.3:
                with suppress(InputError):  # they have nothing in common
                    segments = edited(draw.choice(EXACT).tokens, prompt.tokens)
                    plan["behind"] = "prefix"
            made = request_fields(**segments, engine=engine, **plan)
            asked.append((prompt, {**made, **(forged or {})} if draw.random() < 0.5 else {}))
        by_force = draw.random() < 0.5
        disturbing = threading.Thread(target=disturb, args=(by_force,)) if disturb and number % 5 == 2 else None
        if disturbing is not None:
            disturbing.start()
        answers, reports = ask(*zip(*asked, strict=True))
        if disturbing is not None:
            disturbing.join()
        for (prompt, fields), answer, report in zip(asked, answers, reports, strict=True):
            if fields:
                report = report or {}
                seen.reused_tokens += report.get("segment_tokens", 0) - report.get("recomputed_tokens", 0)
            else:
                seen.exact += 1
                seen.wrong += answer != exact[prompt]
        if draw.random() < 0.3:
            forget()
    return seen


LIVES = 5
Life = TypeVar("Life")


@contextmanager
def homes(directory: Path) -> Iterator[Callable[[int], tuple[dict[str, Any], Callable[[bool], None] | None]]]:
    """Gives each of `LIVES` engines, by number, the settings of its cache and what disturbs it: a small pool over
    a disk, a shared file system and Valkey; the same again; a server; a peer of that one; the pool again."""
    with ExitStack() as ending:
        valkey = ValkeyServer()
        ending.callback(valkey.remove)
        (directory / "shared").mkdir(mode=0o700)
        ports = [free_port(), free_port()]
        servers: dict[int, ServerProcess] = {}
        ending.callback(lambda: [*map(ServerProcess.stop, servers.values())])

        def small(disk: str, *more: Mapping[str, Any]) -> dict[str, Any]:
            first = {"type": "disk", "directory": str(directory / disk), "capacity_bytes": "24MiB"}
            return {"host": {"capacity_bytes": "4MiB"}, "tiers": [first, *more], "cold": {"wait_s": 5.0}}

        def serve(number: int) -> None:
            other = {"type": "peers", "hosts": [f"127.0.0.1:{ports[1 - number]}"], **PATIENT}
            listen = {"listen": f"127.0.0.1:{ports[number]}", "unprotected": True}
            config = small(f"disk of {number}", other) | {"peers": listen}
            servers[number] = launch(config, socket=directory / str(number) / "s", detached=True)

        def give(life: int) -> tuple[dict[str, Any], Callable[[bool], None] | None]:
            if life not in (2, 3):
                shared = {"type": "shared_fs", "directory": str(directory / "shared")}
                return small("disk", shared, {"type": "valkey", "url": valkey.url}), None
            number = life - 2
            serve(number)

            def disturb(by_force: bool) -> None:
                if by_force:
                    os.kill(servers[number].pid, signal.SIGKILL)
                servers[number].stop()
                serve(number)

            return {"server": {"socket": str(servers[number].socket)}, "cold": {"wait_s": 5.0}}, disturb

        yield give


def live_through(
    directory: Path,
    rounds: int,
    start: Callable[[dict[str, Any]], AbstractContextManager[Life]],
    run: Callable[[Life, int, Callable[[bool], None] | None], Seen],
    end: Callable[[Life], object],
) -> None:
    """So many rounds in each of the engines of `homes`: no exact request is wrong, and segments are reused.

    start: an engine over a cache with these settings. run: `interleave`, with this seed. end: of an engine, at rest.
    """
    with homes(directory) as home:
        for life in range(LIVES):
            cache, disturb = home(life)
            with start(cache) as engine:
                seen = run(engine, life, disturb)
                assert seen.wrong == 0
                assert seen.exact > rounds and seen.reused_tokens > 100 * rounds
                end(engine)
