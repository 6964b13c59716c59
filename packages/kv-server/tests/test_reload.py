"""A running server reads its settings again: all of what can change does, or nothing, and whoever asked is told."""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import httpx
import msgspec
import pytest
from kv_core.keys import tenant_tag
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_core.tools.cli import main
from kv_server import RemoteCache, launch, wire
from kv_server.caches import set_quotas
from kv_server.connection import PACKAGE, ask_server
from kv_server.reload import Reloading
from kv_server.report import ReloadReport
from kv_server.succession.channel import FORMAT
from kv_testing.cache_servers import (
    SLOT_BYTES,
    ThreadedServer,
    held,
    join_at,
    join_server,
    read,
    report_of,
    settings_for,
    store,
)
from kv_testing.http import TOKEN, problem
from kv_testing.servers import free_port
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.upgrades import Loads, UpgradedServers
from kv_testing.wait import joined, until
from kv_tiers.tenants import Tenant
from kv_tiers.testing.tier_contract import content

ANN = {"name": "ann", "salt": "ann", "quota_bytes": 3 * SLOT_BYTES}
BOB = {"name": "bob", "salt": "bob"}


class Reloaded(UpgradedServers):
    """A server with HTTP whose file a test rewrites."""

    def __init__(self, home: Path) -> None:
        token = home / "token"
        token.touch(0o600)
        token.write_text(TOKEN)
        self.url = f"http://127.0.0.1:{free_port()}"
        listen = self.url.removeprefix("http://")
        self.settings = settings_for(home, 16, disk=True) | {"http": {"listen": listen, "token_file": str(token)}}
        super().__init__(home, self.settings)

    def write(self, *tenants: dict[str, object], **others: object) -> None:
        """Replaces the file, as an editor does: a server reads the old one or the new one."""
        self.config.with_suffix(".new").write_text(json.dumps(self.settings | {"tenants": tenants} | others))
        self.config.with_suffix(".new").rename(self.config)

    def kv(self, *options: str) -> int:
        return main(["reload", "--socket", str(self.socket), *options])

    def post(self, body: object = None, token: str = TOKEN) -> httpx.Response:
        return httpx.post(f"{self.url}/reload", json=body, headers={"authorization": f"Bearer {token}"}, timeout=60)

    def quotas(self) -> dict[str, int | None]:
        return {tenant.name: tenant.quota_bytes for tenant in report_of(self.socket).caches[0].tenants if tenant.name}

    def resize(self, slots: int, *tenants: dict[str, object], most: int = 16) -> int:
        sizes = {"capacity_bytes": slots * SLOT_BYTES, "max_capacity_bytes": most * SLOT_BYTES}
        self.write(*tenants, host=sizes)
        return self.kv("--take-over")

    def pool(self) -> tuple[int, int]:
        """The slots that it has now, and how many slots' memory its file takes."""
        report, nbytes = report_of(self.socket), 0
        for name in os.listdir(f"/proc/{report.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(f"/proc/{report.pid}/fd/{name}").startswith("/memfd:kv-tiers-"):
                    nbytes = 512 * os.stat(f"/proc/{report.pid}/fd/{name}").st_blocks
        return report.caches[0].counts.slots_total, nbytes // SLOT_BYTES

    def close(self) -> None:
        """End the process that serves, which may be another one than was started."""
        serving = os.pidfd_open(report_of(self.socket).pid)
        signal.pidfd_send_signal(serving, signal.SIGTERM)
        assert select.select([serving], [], [], 60)[0]
        os.close(serving)
        super().close()


@pytest.fixture
def servers(home: Path) -> Iterator[Reloaded]:
    made = Reloaded(home)
    yield made
    made.close()


def test_what_has_changed_and_what_needs_more_is_said(servers: Reloaded, capsys: pytest.CaptureFixture[str]) -> None:
    cache = join_server(servers.home)
    assert (servers.kv(), capsys.readouterr()) == (0, ("nothing has changed\n", ""))
    servers.write(ANN, BOB)
    assert servers.kv() == 0
    assert capsys.readouterr().out.splitlines() == [
        "tenant ann is new, with a quota of 12 KiB",
        "tenant bob is new, with no quota",
    ]
    assert servers.quotas() == {"ann": 3 * SLOT_BYTES, "bob": None}
    rob = {**BOB, "name": "rob", "quota_bytes": SLOT_BYTES}
    servers.write(rob, cold={"wait_s": 2.0}, host={"capacity_bytes": "1GiB"})
    assert servers.kv() == 1
    out, errors = capsys.readouterr()
    assert out.splitlines() == [
        "tenant ann is no longer listed, and has no quota",
        "tenant bob is called rob, and has a quota of 4 KiB (before: no quota)",
    ]
    assert "cold.wait_s stays as it is: a change takes kv reload --take-over, or a restart" in errors
    assert "host.capacity_bytes stays as it is: a change takes a restart" in errors
    assert servers.quotas() == {"rob": SLOT_BYTES}
    assert servers.kv("--json") == 1  # they still wait
    refused = {"cold.wait_s": "take-over", "host.capacity_bytes": "restart"}
    assert json.loads(capsys.readouterr().out)["refused"] == refused
    cache.close()


def test_another_process_takes_over_for_tiers_and_all_but_the_pool(
    servers: Reloaded, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under load, with a tier that goes and comes, once asked over the socket and once over HTTP."""
    cache, kept = join_server(servers.home), key_chain(4, branch="kept")
    store(cache, kept)
    lease = cache.load(kept, "reader", lasting=True)
    loads = Loads(servers.socket, prompts=8)
    pids = [report_of(servers.socket).pid]
    servers.write(ANN, tiers=[], cold={"wait_s": 2.0}, host={"capacity_bytes": "1GiB"})
    assert servers.kv("--take-over") == 1
    out, errors = capsys.readouterr()
    settled = ["tiers is as in the file", "cold.wait_s is as in the file", "another process has taken over"]
    assert out.splitlines() == ["tenant ann is new, with a quota of 12 KiB", *settled]
    assert errors.splitlines()[-1] == "kv reload: host.capacity_bytes stays as it is: a change takes a restart"
    pids.append(report_of(servers.socket).pid)
    assert (report_of(servers.socket).caches[0].tiers, servers.quotas()) == ([], {"ann": 3 * SLOT_BYTES})
    servers.write()
    answer = servers.post({"take_over": True})
    assert answer.json()["changed"][1:] == ["host.capacity_bytes is as in the file", *settled]
    until(lambda: report_of(servers.socket).pid not in pids)
    rounds = sum(loads.rounds)
    until(lambda: sum(loads.rounds) > rounds + 20 or loads.failures, 60)
    loads.stop()
    assert not loads.failures
    assert [tier.name for tier in report_of(servers.socket).caches[0].tiers] == ["disk"]
    assert cache.release(lease)  # type: ignore[arg-type]
    assert cache.generation == 0
    cache.close()


def test_the_pool_shrinks_below_what_is_leased_and_grows_again(servers: Reloaded) -> None:
    """What is read stays where it is until that ends; what is only kept moves. The rest goes, the least worth first."""
    cache, young, old = join_server(servers.home), key_chain(6, branch="young"), key_chain(6, branch="old")
    for keys in (old, young, key_chain(4, branch="kept")):
        store(cache, keys)
    lease = cache.load(young, "reader", lasting=True)
    assert isinstance(lease, ReadLease)
    assert cache.lookup(key_chain(4, branch="kept"), "promised").chunks == 4
    assert servers.pool() == (16, 16)
    assert servers.resize(3) == 1  # of max_capacity_bytes it says that it takes a restart
    until(lambda: servers.pool() == (3, 10))  # not more than what is leased
    assert cache.begin_store(key_chain(1, branch="new"), "w").refused
    assert read(cache, key_chain(4, branch="kept")) and cache.renew("promised")
    assert [bytes(cache.pool.view[at.offset : at.offset + at.nbytes]) for at in lease.extents] == [
        content(key, CHUNK_BYTES) for key in young
    ]
    assert cache.release(lease)
    cache.end("promised")
    until(lambda: servers.pool() == (3, 3))
    assert report_of(servers.socket).caches[0].counts.slots_used == 3
    assert servers.resize(16) == 0
    assert held(cache, old) == 6  # from the disk
    for number in range(4):
        store(cache, key_chain(4, branch=f"new {number}"))
    assert servers.pool() == (16, 16) and cache.generation == 0
    cache.close()


def test_memory_that_may_be_registered_with_a_device_stays_until_its_client_ends(servers: Reloaded) -> None:
    cache, engine = join_server(servers.home), join_server(servers.home, facts={})
    store(cache, key_chain(16))
    assert servers.resize(4) == 1
    until(lambda: f"which may have them registered with a GPU: {os.getpid()}" in servers.log.read_text())
    assert servers.pool() == (4, 16) and cache.counts().slots_used == 4
    assert read(engine, key_chain(4)) and read(cache, key_chain(4))
    assert servers.resize(8) == 0
    store(engine, key_chain(8, branch="more"))
    assert read(cache, key_chain(8, branch="more"))
    engine.close()
    del engine
    gc.collect()  # with it goes the mapping
    until(lambda: servers.pool() == (8, 8))
    cache.close()


def test_a_size_that_cannot_be_changes_nothing(servers: Reloaded, capsys: pytest.CaptureFixture[str]) -> None:
    cache = join_server(servers.home)
    store(cache, key_chain(10))
    assert servers.resize(2, ANN) == 2 and "the quotas are" in capsys.readouterr().err
    assert servers.resize(8, most=4) == 2 and "max_capacity_bytes is less" in capsys.readouterr().err
    servers.write(ANN)
    assert servers.kv() == 0
    authorized = {"authorization": f"Bearer {TOKEN}"}
    body = {"quota_bytes": 12 * SLOT_BYTES}
    assert httpx.put(f"{servers.url}/quota/{'0' * 14}", json=body, headers=authorized).status_code == 200
    assert servers.resize(20, ANN, most=20) == 1
    refused = capsys.readouterr().err
    assert "host.capacity_bytes stays" in refused and "host.max_capacity_bytes stays" in refused
    assert servers.pool() == (16, 10)
    cache.close()


@pytest.mark.slow
def test_sizes_change_under_load(servers: Reloaded) -> None:
    """Nothing that is found is wrong, and no lease is lost."""
    cache, kept = join_server(servers.home), key_chain(3, branch="kept")
    store(cache, kept)
    lease = cache.load(kept, "reader", lasting=True)
    loads = Loads(servers.socket, prompts=8)
    for slots in (6, 12, 9, 16, 4, 16):
        assert servers.resize(slots) in (0, 1)
        rounds = sum(loads.rounds)
        until(lambda rounds=rounds: sum(loads.rounds) > rounds + 20 or loads.failures, 60)
        until(lambda slots=slots: (servers.pool()[0] == slots and servers.pool()[1] <= slots) or loads.failures)
    loads.stop()
    assert not loads.failures
    assert cache.release(lease) and read(cache, kept)  # type: ignore[arg-type]
    cache.close()


def test_quotas_of_tiers_are_those_of_the_process_that_takes_over(
    servers: Reloaded, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, keys = join_server(servers.home), key_chain(6, salt="ann")
    (disk,) = servers.settings["tiers"]  # type: ignore[misc]
    chunk = disk["capacity_bytes"] // 200 + 1

    def used() -> list[int]:
        (tier,) = report_of(servers.socket).caches[0].tiers
        return [6 * quota.used_bytes // quota.quota_bytes for quota in tier.usage.quotas]

    ann = {"name": "ann", "salt": "ann"}
    servers.write(ann, tiers=[disk | {"quota_bytes": {"ann": 6 * chunk}}])
    assert servers.kv() == 1 and servers.kv("--take-over") == 0
    store(cache, keys)
    store(cache, key_chain(6))
    until(lambda: used() == [6])
    capsys.readouterr()
    servers.write(tiers=[disk])
    assert servers.kv() == 2
    assert "tenant ann has a quota in a tier" in capsys.readouterr().err
    servers.write(ann, tiers=[disk | {"quota_bytes": {"ann": 2 * chunk}}])
    assert servers.kv("--take-over") == 0
    assert used() == [6]  # of the two that are left
    until(lambda: report_of(servers.socket).caches[0].tiers[0].usage.chunks == 8)
    cache.close()


def test_if_no_process_takes_over_all_stays_and_the_reason_is_said(
    servers: Reloaded, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, kept, pid = join_server(servers.home), key_chain(4, branch="kept"), report_of(servers.socket).pid
    store(cache, kept)
    nowhere = {"type": "disk", "directory": str(servers.home / "no" / "such"), "capacity_bytes": "1MiB"}
    servers.write(tiers=[nowhere])
    assert servers.kv("--take-over") == 2
    assert str(servers.home / "no") in capsys.readouterr().err
    servers.write(cold={"wait_s": 2.0})
    assert main(["freeze", "--socket", str(servers.socket)]) == 0
    assert servers.kv("--take-over") == 2
    said = capsys.readouterr().err
    assert "cold.wait_s stays as it is" in said
    assert "no other process has taken over" in said and "kv freeze --end" in said
    assert "end that first (kv freeze --end)" in servers.log.read_text()
    assert "kv freeze --end" in problem(servers.post({"take_over": True}), 409)
    until(lambda: [tier.health.name for tier in report_of(servers.socket).caches[0].tiers] == ["UP"])
    assert (report_of(servers.socket).pid, held(cache, kept), cache.generation) == (pid, 4, 0)
    cache.close()


def test_a_service_manager_learns_which_process_goes_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(60)
        manager.bind(str(home / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(home / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "50000")
        servers = Reloaded(home)

        def next_said() -> tuple[str, int]:
            """What is said next, but for signs of life."""
            while (said := manager.recv(100)) == b"WATCHDOG=1":
                pass
            return said.decode(), report_of(servers.socket).pid

        (ready, first) = next_said()
        servers.write(cold={"wait_s": 2.0})
        assert servers.kv("--take-over") == 0
        (passed_on, second) = next_said()
        assert first != second
        assert (ready, passed_on) == ("READY=1", f"MAINPID={second}")
        assert next_said() == ("READY=1", second)
        while manager.recv(100) != b"WATCHDOG=1":
            pass
        servers.close()


WRONG = {
    "": "cannot be read",
    "{": "is not JSON",
    '{"tenants": [{"name": "a"}]}': "write one of salt, salt_file and tag",
    '{"tenants": [{"name": "a", "salt_file": "/nowhere/salt"}]}': "/nowhere/salt",
    '{"tiers": [{"type": "dusk"}]}': "dusk",
    '{"tiers": [{"type": "disk", "directory": "/kv"}]}': "capacity_bytes",
    '{"hots": {}}': "there is no setting 'hots'",
}


def test_a_file_that_is_wrong_or_gone_changes_nothing(servers: Reloaded, capsys: pytest.CaptureFixture[str]) -> None:
    cache = join_server(servers.home)
    servers.write(ANN)
    assert servers.kv() == 0
    for text, says in WRONG.items():
        servers.config.unlink(missing_ok=True)
        if text:
            servers.config.write_text(text)
        assert servers.kv() == 2
        assert says in capsys.readouterr().err
        assert says in problem(servers.post(), 409)
        assert servers.quotas() == {"ann": 3 * SLOT_BYTES}
    servers.write(ANN)
    assert servers.kv() == 0
    cache.close()


def test_names_reach_http_and_the_token_is_needed(servers: Reloaded) -> None:
    cache = join_server(servers.home)
    servers.write(ANN)
    assert problem(servers.post(token="another-token-that-is-wrong"), 401)
    assert problem(httpx.get(f"{servers.url}/quota/ann"), 404)
    assert servers.post().json() == {"changed": ["tenant ann is new, with a quota of 12 KiB"], "refused": {}, "why": ""}
    assert httpx.get(f"{servers.url}/quota/ann").json()["caches"][0]["quota_bytes"] == 3 * SLOT_BYTES
    authorized = {"authorization": f"Bearer {TOKEN}"}
    put = httpx.put(f"{servers.url}/quota/ann", json={"quota_bytes": 2 * SLOT_BYTES}, headers=authorized)
    assert put.json()["caches"][0]["quota_bytes"] == 2 * SLOT_BYTES
    assert httpx.post(f"{servers.url}/clear", json={"tenant": "ann"}, headers=authorized).json()["caches"] == 1
    tenants = httpx.get(f"{servers.url}/status").json()["caches"][0]["tenants"]
    assert [tenant["name"] for tenant in tenants] == ["ann"]
    servers.write({**ANN, "name": "anna"})
    assert servers.post().status_code == 200
    assert "the settings list anna" in problem(httpx.get(f"{servers.url}/quota/ann"), 404)
    cache.close()


def test_a_server_without_a_file_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = launch(settings_for(home), socket=home / "s")
    assert main(["reload", "--socket", str(home / "s")]) == 2
    assert "start it with --config FILE" in capsys.readouterr().err
    server.stop()
    assert main(["reload", "--socket", str(home / "s")]) == 2


def test_a_quota_that_one_format_cannot_have_changes_no_other(servers: Reloaded) -> None:
    caches = [join_at(servers.socket, "one"), join_at(servers.socket, "two")]
    authorized = {"authorization": f"Bearer {TOKEN}"}
    body = {"quota_bytes": 12 * SLOT_BYTES, "fingerprint": "two"}
    assert httpx.put(f"{servers.url}/quota/{'0' * 14}", json=body, headers=authorized).status_code == 200
    before = report_of(servers.socket).caches
    servers.write({**ANN, "quota_bytes": 5 * SLOT_BYTES}, BOB)
    assert "17 chunks, with those set over HTTP" in problem(servers.post(), 409)
    assert report_of(servers.socket).caches == before
    large = RemoteCache(servers.socket, group_bytes=(4 * SLOT_BYTES,), fingerprint="large", timeout_s=30)
    servers.write(ANN)
    assert "holds no chunk of this model" in problem(servers.post(), 409)
    assert report_of(servers.socket).caches[:2] == before
    for cache in (*caches, large):
        cache.close()


def test_quotas_that_another_thread_takes_meanwhile_are_given_back() -> None:
    served = ThreadedServer(slots=8)
    clients = [served.join("one"), served.join("two")]
    one, two = served.server.caches.values()
    real, tags = two.admin.set_quota, (tenant_tag("a"), tenant_tag("b"))

    def taken(tenant: bytes, quota_bytes: int | None) -> None:
        if tenant == tags[1]:
            real(tenant_tag("other"), 7 * SLOT_BYTES)
        real(tenant, quota_bytes)

    two.admin.set_quota = taken  # type: ignore[method-assign]
    with pytest.raises(Exception, match="leave"):
        set_quotas([one, two], {tags[0]: SLOT_BYTES, tags[1]: 2 * SLOT_BYTES})
    assert {use.tenant for cache in (one, two) for use in cache.admin.tenants()} == {tenant_tag("other")}
    for client in clients:
        client.close()
    served.close()


def test_signals_and_requests_at_once_leave_what_the_file_has_last(servers: Reloaded) -> None:
    cache = join_server(servers.home)
    answers: list[int] = []

    def ask(number: int) -> None:
        for turn in range(10):
            servers.process.send_signal(signal.SIGHUP)
            answers.append(servers.post().status_code if number % 2 else servers.kv("--json"))
            if number == 0:
                servers.write({**ANN, "quota_bytes": (1 + turn % 4) * SLOT_BYTES}, *[BOB] * (turn % 2))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert set(answers) == {200, 0}
    assert servers.kv() == 0
    assert servers.quotas() == {"ann": 2 * SLOT_BYTES, "bob": None}
    cache.close()


def test_fifty_reloads_under_load_lose_nothing(servers: Reloaded, capsys: pytest.CaptureFixture[str]) -> None:
    cache, keys = join_server(servers.home), key_chain(6, salt="ann")
    kept = key_chain(4, branch="kept")
    store(cache, kept)
    lease = cache.load(kept, "reader", lasting=True)
    loads = Loads(servers.socket, prompts=8)

    def held() -> int:
        """What is leased meanwhile may stay beyond the quota: so the lease ends here."""
        found = cache.lookup(keys, "r").chunks
        cache.end("r")
        return found

    for number in range(25):
        wanted = (3 + number % 3) * SLOT_BYTES
        servers.write({**ANN, "quota_bytes": wanted})
        assert servers.kv() == 0
        assert servers.quotas() == {"ann": wanted}
        store(cache, keys)
        until(lambda wanted=wanted: held() <= wanted // SLOT_BYTES)
        servers.write()
        servers.process.send_signal(signal.SIGHUP)
        until(lambda: servers.quotas() == {})
    rounds = sum(loads.rounds)
    until(lambda: sum(loads.rounds) > rounds + 20 or loads.failures, 60)
    loads.stop()
    assert not loads.failures
    assert cache.release(lease)  # type: ignore[arg-type]
    cache.close()


def test_an_engine_that_comes_meanwhile_gets_the_new_settings() -> None:
    """Its cache is not opened before they are in force, and no other process takes over meanwhile."""
    served = ThreadedServer(slots=8)
    old = served.server._config
    new = msgspec.structs.replace(old, tenants=[Tenant("ann", tenant_tag("ann"), 2 * SLOT_BYTES)])
    begun, go_on = threading.Event(), threading.Event()

    def succeed() -> NoReturn:
        raise AssertionError

    class Slow(Reloading):
        def _change_tenants(self, before: Mapping[bytes, int], tenants: list[Tenant]) -> None:
            begun.set()
            assert go_on.wait(10)
            super()._change_tenants(before, tenants)

    reports: list[ReloadReport] = []
    reloading = Slow(served.server, old, lambda: new, succeed)
    reloading.start()
    reloading.want(reports.append)
    assert begun.wait(10)
    joins: list[RemoteCache] = []
    joining = threading.Thread(target=lambda: joins.append(served.join()))
    joining.start()
    until(lambda: any(client.waiting for client in served.server._connections.all()))
    answer = ask_server(served.path, wire.TakeOver(FORMAT, PACKAGE))
    assert isinstance(answer, wire.Failed) and "are being read again" in answer.text
    assert not served.server.formats.opening
    go_on.set()
    joined(joining)
    until(lambda: reports)
    assert reports[0].changed == ["tenant ann is new, with a quota of 8 KiB"]
    (cache,) = served.server.caches.values()
    assert [use.quota_bytes for use in cache.admin.tenants()] == [2 * SLOT_BYTES]
    joins[0].close()
    served.close()
