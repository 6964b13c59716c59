"""A verb that dies in the middle, and a server that does: nothing is lost, nothing hangs, and the next run finishes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from kv_cluster.client import Client
from kv_core.keys import ChunkKey
from kv_testing.cache_servers import join_at, kill_server, read, store
from kv_testing.fleet import FourServers, Load, prompt
from kv_testing.wait import until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("load")]
KV = [sys.executable, "-c", "import sys; from kv_core.tools.command import main; sys.exit(main())"]
Verb = Callable[[list[ChunkKey]], tuple[int, Any]]


class Killed:
    """The process that runs the verb dies with its n-th request: before that is sent, or before its answer is here."""

    def __init__(self, patch: pytest.MonkeyPatch, after: int, *, is_sent: bool) -> None:
        exchange, numbers = Client._exchange, count()
        self.has_died = False

        def until_death(asking: Client, url: str, path: str, body: object, until_s: float) -> tuple[int, bytes]:
            number = next(numbers)
            if number < after:
                return exchange(asking, url, path, body, until_s)
            self.has_died = True
            if number == after and is_sent:
                exchange(asking, url, path, body, until_s)
            raise OSError("killed")

        patch.setattr(Client, "_exchange", until_death)


def interrupted_everywhere(
    keys_of: Callable[[int], list[ChunkKey]], verb: Verb, is_whole: Callable[[list[ChunkKey], bool], bool]
) -> None:
    """Run the verb again and again, dying ever later, until it does not die any more; each time then run it to its end.
    is_whole: what holds then (True) and when it has died."""
    for after in count():
        keys = keys_of(after)
        with pytest.MonkeyPatch.context() as patch:
            killed = Killed(patch, after, is_sent=after % 2 == 0)
            verb(keys)
        assert is_whole(keys, not killed.has_died), after
        status, answer = verb(keys)
        assert status == 0 and is_whole(keys, True), (after, answer)
        if not killed.has_died:
            assert after > 5
            return


@pytest.mark.parametrize("verb", ["move", "replicate", "pin", "clear"])
def test_a_verb_that_dies_anywhere_has_lost_nothing_and_is_finished_by_the_next(fleet: FourServers, verb: str) -> None:
    move = ["--from", fleet.name(0), "--to", fleet.name(2)]
    words = {"move": move, "replicate": ["--copies", "3"], "pin": ["system"], "clear": []}[verb]

    def keys_of(number: int) -> list[ChunkKey]:
        keys = prompt(f"{verb} {number}", 4)
        for cache in fleet.caches[: 1 if verb == "move" else 2]:
            store(cache, keys)
        return keys

    def is_whole(keys: list[ChunkKey], is_done: bool) -> bool:
        held = fleet.held(keys)
        match verb:
            case "move":
                return held == [0, 0, 4, 0] if is_done else 4 in held
            case "replicate":
                return held[:2] == [4, 4] and (held.count(4) == 3 or not is_done)
            case "pin":
                return held[:2] == [4, 4] and (len(fleet.pins(0)) == len(fleet.pins(1)) == 1 or not is_done)
        return held == [0] * 4 or not is_done

    interrupted_everywhere(keys_of, lambda keys: fleet.run(verb, *words, keys=keys), is_whole)
    if verb == "pin":
        fleet.texts("unpin", "system", "--salt", "salt of acme")


def test_two_moves_in_opposite_directions_never_drop_both_copies(
    fleet: FourServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one as a whole between the first one's last look at its target and its drop."""
    keys, exchange = prompt("both ways", 4), Client._exchange
    for number in (0, 2):
        store(fleet.caches[number], keys)
    second: list[int] = []

    def before_the_drop(asking: Client, url: str, path: str, body: object, until_s: float) -> tuple[int, bytes]:
        if path.endswith("/drop") and not second:
            second.append(-1)
            second[:] = [fleet.run("move", "--from", fleet.name(2), "--to", fleet.name(0), keys=keys)[0]]
        return exchange(asking, url, path, body, until_s)

    monkeypatch.setattr(Client, "_exchange", before_the_drop)
    status, answer = fleet.run("move", "--from", fleet.name(0), "--to", fleet.name(2), keys=keys)
    assert 4 in fleet.held(keys)
    assert second == [1] and status == 1
    assert "moved to this very host within the last 15 s" in answer["servers"][1]["text"]
    assert fleet.texts("clear", keys=keys)[0] == "cleared 4 leading chunks"  # that is no move


def test_a_process_that_is_killed_in_a_move_and_one_that_is_not_leave_the_same(fleet: FourServers) -> None:
    """With SIGKILL, at moments that nobody chose."""
    keys = prompt("killed", 64)
    store(fleet.caches[0], keys)
    words = fleet.arguments("move", "--from", fleet.name(0), "--to", fleet.name(2), keys=keys)
    command = [*KV, *words]
    began_s = time.monotonic()
    subprocess.run([*KV, "cluster", "health", "--config", str(fleet.config)], timeout=60, check=True,
                   capture_output=True)  # fmt: skip
    whole_s = time.monotonic() - began_s
    for part in range(8):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(whole_s * (0.6 + part / 16))
            process.kill()
            process.wait(30)
        assert 64 in fleet.held(keys)
        if fleet.held(keys)[0] == 0:  # it was done: the other way round from now on
            store(fleet.caches[0], keys)
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    held = fleet.held(keys)
    assert (held[0], held[2]) == (0, 64) and read(fleet.caches[2], keys)


def test_a_target_that_is_killed_is_named_and_served_again_later(fleet: FourServers, load: Load) -> None:
    load.close()  # its engines would lose their server
    keys = prompt("to one that is killed", 32)
    store(fleet.caches[0], keys)
    with fleet.stopped(0):  # so the target cannot fetch anything, and the verb is in its middle
        began_s = time.monotonic()
        status, answer = fleet.run("move", "--from", fleet.name(0), "--to", fleet.name(2), "--timeout", "3", keys=keys)
        assert status == 1 and time.monotonic() - began_s < 20
    words = ("move", "--from", fleet.name(0), "--to", fleet.name(2))
    kill_server(fleet.servers[2])
    fleet.caches[2].close()
    status, answer = fleet.run(*words, keys=keys)
    assert status == 1 and "cannot be reached" in str(answer)
    assert fleet.held(keys)[0] == 32
    fleet.servers[2] = fleet.start(2)
    fleet.caches[2] = join_at(fleet.servers[2].socket)
    until(lambda: fleet.run("health")[0] == 0, 20)
    assert fleet.texts(*words, keys=keys) == {2: "has fetched 32 chunks, and holds 32", 0: "dropped 32 chunks"}
    assert read(fleet.caches[2], keys)


def test_a_server_that_is_killed_while_it_is_drained_is_named(
    fleet: FourServers, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    load.close()
    store(fleet.caches[3], prompt("drained", 16))
    exchange = Client._exchange

    def killed_once_begun(asking: Client, url: str, path: str, body: object, until_s: float) -> tuple[int, bytes]:
        answer = exchange(asking, url, path, body, until_s)
        if path == "/drain" and body is not None:
            kill_server(fleet.servers[3])
        return answer

    os.kill(fleet.servers[1].pid, signal.SIGSTOP)  # one that says nothing: the drain begins
    with monkeypatch.context() as patch:
        patch.setattr(Client, "_exchange", killed_once_begun)
        status, answer = fleet.run("drain", fleet.name(3))
    os.kill(fleet.servers[1].pid, signal.SIGCONT)
    assert status == 1 and "its drain has begun, and it stopped answering" in str(answer)
    fleet.caches[3].close()
    fleet.servers[3] = fleet.start(3)
    fleet.caches[3] = join_at(fleet.servers[3].socket)
    until(lambda: fleet.run("health")[0] == 0, 20)
    assert fleet.texts("drain", fleet.name(3))[3].startswith("drained")
