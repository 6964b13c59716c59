"""The page, in a real browser, on a real server with real traffic: what it shows is what the server says."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from kv_core import ChainScheme, KeySequence, KeySpace, tenant_tag
from kv_core.cost import Costs
from kv_core.coverage import ALL, STATE, ChunkShape
from kv_core.service import Ended, ReadLease
from kv_core.testing import key_chain
from kv_server import RemoteCache, ServerProcess, launch, wire
from kv_server.connection import ask_server
from kv_server.http import timeline
from kv_testing.http import Served, store
from kv_testing.servers import free_port
from kv_testing.service_contract import CHUNK_BYTES as SMALL_BYTES
from kv_testing.shapes import keys_for
from kv_testing.wait import line, until

pytestmark = pytest.mark.slow  # a browser for all
CHUNK_BYTES = 64 << 10
PENDING = ("waiting", "under_way")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

if CHROMIUM is None and not os.environ.get("CI"):
    pytest.skip("no Chromium; scripts/setup.sh browser installs it as root", allow_module_level=True)


class Browser:
    """Chromium, told what to do over its debugging pipe: a JSON message, a zero byte, and so on."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None, "no Chromium; scripts/setup.sh browser installs it as root"
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        # It reads from descriptor 3 and writes to 4, and nothing else knows those numbers.
        become = (
            "import fcntl, os, sys; a, b = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]); "
            "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
        )
        self._process = subprocess.Popen(
            [
                sys.executable, "-c", become, str(to_browser), str(from_browser), CHROMIUM, "--headless=new",
                "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
                "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
                f"--user-data-dir={profile}", "about:blank",
            ],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._arrived = b""
        self.complaints: list[str] = []
        """What scripts threw and the console was told, violations of the page's policy among it."""
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.tell(f"{domain}.enable")

    _session = ""

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while True:
            heard = self._hear(end)
            if heard.get("id") == number:
                assert "error" not in heard, (method, heard["error"])
                result: dict[str, Any] = heard["result"]
                return result
            if heard.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(heard["params"]))

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def go(self, url: str) -> None:
        self.tell("Page.navigate", url=url)

    def leave(self) -> None:
        """The page: it complains if its server has gone."""
        self.go("about:blank")
        until(lambda: self.value("location.href") == "about:blank")
        self.complaints.clear()

    def value(self, expression: str) -> Any:
        """What this is in the page now."""
        got = self.tell("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def text(self) -> str:
        text = self.value("document.body?.innerText ?? ''")
        assert isinstance(text, str)
        return text

    def press(self, key: str) -> None:
        """A key as a person presses it: Tab, Enter, Space."""
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        code = {"Tab": 9, "Enter": 13, "Space": 32}[key]
        name = " " if key == "Space" else key
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if kind == "keyDown" and text else {}
            self.tell("Input.dispatchKeyEvent", type=kind, key=name, code=key, windowsVirtualKeyCode=code, **more)

    def tab_to(self, control: str) -> None:
        """By the keyboard alone, from wherever the focus is."""
        for _ in range(60):
            if self.value("document.activeElement?.id") == control:
                return
            self.press("Tab")
        raise AssertionError(f"no Tab leads to {control}")

    def type_into(self, control: str, text: str) -> None:
        self.tab_to(control)
        self.value("document.activeElement.select()")
        self.tell("Input.insertText", text=text)

    def controls(self) -> list[tuple[str, str]]:
        """The role and name of everything that a screen reader offers to be operated."""
        self.tell("Accessibility.enable")
        nodes = self.tell("Accessibility.getFullAXTree")["nodes"]
        operable = {"button", "textbox", "searchbox", "checkbox"}
        found = [(node["role"]["value"], node["name"]["value"].strip()) for node in nodes if "name" in node]
        return [one for one in found if one[0] in operable]

    def picture(self) -> bytes:
        return base64.b64decode(self.tell("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def close(self) -> None:
        self._session = ""
        os.write(self._commands, b'{"id":0,"method":"Browser.close"}\0')
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        os.close(self._commands)
        os.close(self._answers)

    def _hear(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._arrived:
            assert select.select([self._answers], [], [], max(0.0, end - time.monotonic()))[0], "Chromium is silent"
            data = os.read(self._answers, 1 << 20)
            assert data, "Chromium has ended"
            self._arrived += data
        message, _, self._arrived = self._arrived.partition(b"\0")
        heard: dict[str, Any] = json.loads(message)
        return heard


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_earlier_page(browser: Browser) -> None:
    browser.leave()


def spill_counts(server: ServerProcess) -> dict[str, int]:
    counts: dict[str, int] = httpx.get(f"{server.url}status").json()["caches"][0]["tiers"][0]["spill"]
    return counts


def start(tmp_path: Path, http: str = "127.0.0.1:0", token_file: str = "") -> ServerProcess:
    nvme = {"type": "disk", "name": "nvme", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    tiers = [nvme | {"quota_bytes": {"acme": "16MiB"}}]
    tenants = [{"name": "acme", "salt": "acme", "quota_bytes": "1MiB"}]
    return launch(
        {
            "host": {"capacity_bytes": "8MiB", "policy": "lru"},
            "tiers": tiers,
            "tenants": tenants,
            "http": {"listen": http, "token_file": token_file},
        },
        socket=tmp_path / "s" / "kv.sock",
    )


def join(server: ServerProcess, engine: str = "engine-1") -> RemoteCache:
    facts = {"chunk_tokens": "256", "model_name": "Llama <b>3.1</b>"}
    return RemoteCache(server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="llama", engine=engine, facts=facts)


def hits(cache: RemoteCache, chunks: int, branch: str) -> int:
    keys = key_chain(chunks, branch=branch)
    found = cache.lookup(keys, "r", shape=ChunkShape(256)).chunks
    lease = cache.load(keys[:found], "r")
    assert isinstance(lease, ReadLease)
    cache.release(lease)
    cache.end("r")
    return found


def comes_up(cache: RemoteCache, chunks: int, branch: str) -> bool:
    """Ask as an engine does, which waits for what is on its way up, but not for ever."""
    keys = key_chain(chunks, branch=branch)
    found = cache.lookup(keys, "r", wait_for_promotion=True)
    while found.ended is Ended.PENDING:
        found = cache.lookup(keys, "r", wait_for_promotion=True)
    cache.end("r")
    return found.chunks == chunks


def test_it_shows_what_the_server_says(browser: Browser, tmp_path: Path) -> None:
    server = start(tmp_path)
    cache = join(server, "<b>engine-1</b>")
    store(cache, 30, "a")
    assert hits(cache, 40, "a") == 30
    browser.look(1400, 1000)
    browser.go(server.url)
    until(lambda: "75.0 %" in browser.text())
    text = browser.text()
    assert f"process {server.pid}" in text
    assert "7,680" in text  # tokens of 30 chunks
    assert "1.88 MiB" in browser.value("document.getElementById('tiles').innerText")  # which were loaded
    assert "Llama <b>3.1</b> · cache " in text
    assert "<b>engine-1</b>" in text  # text, and no element
    assert "chunk_tokens 256" in text
    tenants = browser.value("[...document.querySelectorAll('#tenants tr')].map(r => r.innerText).join('|')")
    assert "acme\t0 B\t1.00 MiB\t0.0 %\t0\tnvme 0 B of 15.5 MiB" in tenants  # 62 slots
    assert "(shared)\t1.88 MiB\t–" in tenants
    until(lambda: browser.value("document.getElementById('state').textContent") == "serving")
    status = httpx.get(f"{server.url}status").json()["caches"][0]
    pool_row = browser.value("[...document.querySelectorAll('#capacity tr')].map(r => r.innerText).join('|')")
    assert f"{status['counts']['chunks_resident']}" in pool_row
    assert "nvme" in pool_row
    assert "● up" in pool_row
    for _ in range(3):  # it goes on by itself
        before = browser.value("samples.at(-1).at")
        until(lambda before=before: browser.value("samples.at(-1).at") > before)
    assert hits(cache, 30, "a") == 30
    until(lambda: "85.7 % in all" in browser.text())
    store(cache, 60, "b")
    until(lambda: "◂" in browser.value("document.getElementById('flow').textContent"))
    until(lambda: browser.value("Math.max(...flows().map(link => link.down))") > 0)
    until(lambda: browser.value("document.querySelectorAll('#flow .ribbon-down').length") == 2)
    assert browser.complaints == []
    for branch in ("c", "d", "e"):
        store(cache, 60, branch)
        until(
            lambda: (
                sum(httpx.get(f"{server.url}status").json()["caches"][0]["tiers"][0]["spill"][of] for of in PENDING)
                == 0
            )
        )
    until(lambda: comes_up(cache, 60, "c"))
    until(lambda: browser.value("latest.caches[0].tiers[0].lane.loaded") == 60)
    # What came up from the disk is in the pool, and was not stored by an engine.
    assert browser.value("samples.at(-1).storedBytes") == (30 + 4 * 60) * CHUNK_BYTES
    cache.close()
    until(lambda: "Nobody is connected" in browser.text())
    assert "Tokens saved" in browser.text()
    assert browser.value("samples.at(-1).tokens") == 2 * 7680  # what came up for a lookup without a shape is no tokens
    assert "Llama <b>3.1</b>" in browser.text()  # also when its engine has gone
    for is_frozen in (True, False):
        ask_server(server.socket, wire.Freeze(is_frozen))
        until(lambda is_frozen=is_frozen: ("frozen: stores nothing new" in browser.text()) == is_frozen)
    server.stop()


def test_it_draws_the_history_that_the_server_keeps(
    browser: Browser, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(timeline, "SAMPLE_S", 0.05)
    served = Served()
    request.addfinalizer(served.close)
    browser.look(1400, 1000)
    browser.go(served.http.url)
    until(lambda: "30 days" in browser.text())
    until(lambda: browser.value("past?.starts_s.length > 0"))
    cache = served.join()
    store(cache, 6)
    keys = key_chain(8)
    assert cache.lookup(keys, "r").chunks == 6
    lease = cache.load(keys[:6], "r")
    assert isinstance(lease, ReadLease)
    cache.release(lease)
    until(lambda: sum(httpx.get(f"{served.http.url}history/hour").json()["loaded_bytes"]) == 6 * SMALL_BYTES)
    label = "document.querySelector('#history svg')?.getAttribute('aria-label')"
    for name, shown in (("day", "1 d 0 h"), ("month", "30 d 0 h"), ("hour", "1 h 0 min")):
        loaded = browser.value(f"bytes({6 * SMALL_BYTES})")
        told = f"In the last {shown}: hit ratio 75.0 %, {loaded} loaded, {loaded} stored"
        browser.value(f"document.querySelector('#spans [value={name}]').click()")  # once: each click asks anew
        until(lambda told=told: browser.value(label) == told, 20)
        assert browser.value("document.querySelector('#spans [aria-pressed=true]').value") == name
        bars = "[...document.querySelectorAll('#history .{}')].map(bar => +bar.getAttribute('height')).join()"
        for kind in ("loaded", "stored"):
            assert sum(map(float, browser.value(bars.format(kind)).split(","))) > 0
        assert browser.value("document.querySelectorAll('#history .ratio').length") == 1
    assert browser.complaints == []
    cache.close()


def test_chunks_of_several_groups_of_layers_are_counted_once_in_every_row(browser: Browser, tmp_path: Path) -> None:
    server = start(tmp_path)
    cache = RemoteCache(server.socket, group_bytes=(CHUNK_BYTES, CHUNK_BYTES), fingerprint="hybrid")
    cache.commit(cache.begin_store(keys_for(ChunkShape(4, (ALL, STATE)), 5)[:9], "w"))
    browser.go(server.url)
    rows = "[...document.querySelectorAll('#capacity tr')].map(r => r.innerText).join('|')"
    until(lambda: browser.value(rows).count("\t5 (5 / 4)\t") == 2)  # the pool's and the disk's
    cache.close()
    server.stop()


def test_it_says_when_the_server_is_away_and_goes_on_when_it_is_back(browser: Browser, tmp_path: Path) -> None:
    server = start(tmp_path)
    cache = join(server)
    store(cache, 10, "a")
    browser.go(server.url)
    until(lambda: "engine-1" in browser.text())
    address = server.url.removeprefix("http://").rstrip("/")
    first_pid = server.pid
    cache.close()
    server.stop()
    until(lambda: "away since" in browser.text())
    assert browser.value("document.title") == "▲ kv-server is away"
    assert "engine-1" in browser.text()  # what was known last stays in sight
    server = start(tmp_path, address)
    assert server.pid != first_pid
    until(lambda: f"process {server.pid}" in browser.text())
    assert browser.value("document.getElementById('state').textContent") == "serving"
    assert browser.value("samples.every(sample => sample.at <= latest.uptime_s)")
    server.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_it_is_readable_at_any_width_and_in_either_light(
    browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    server = start(tmp_path)
    cache = join(server)
    store(cache, 30, "a")
    hits(cache, 40, "a")
    browser.look(width, 900, scheme)
    browser.go(server.url)
    until(lambda: "75.0 %" in browser.text())
    assert browser.value("document.documentElement.scrollWidth") <= width
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert contrast(browser.value("getComputedStyle(document.body).color"), background) >= 7
    for kind in (".soft", ".about", "#state", "svg text"):
        colour = f"getComputedStyle(document.querySelector('{kind}')).{'fill' if 'svg' in kind else 'color'}"
        assert contrast(browser.value(colour), background) >= 4.5, kind
    unlabelled = "[...document.querySelectorAll('svg, [role=img]')].filter(e => !e.getAttribute('aria-label')).length"
    assert browser.value(unlabelled) == 0
    outside = (
        "[...document.querySelectorAll('svg text')].filter(e => { const r = e.getBoundingClientRect(), "
        "s = e.closest('section').getBoundingClientRect(); return r.left < s.left || r.right > s.right; }).length"
    )
    assert browser.value(outside) == 0
    cache.close()
    server.stop()


def test_it_loads_nothing_but_itself(tmp_path: Path) -> None:
    server = start(tmp_path)
    answer = httpx.get(server.url)
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "'unsafe" not in policy
    for sign in ("//cdn", "https://", "src=", "@import", "innerHTML", "onclick"):
        assert sign not in answer.text.replace("http://www.w3.org/2000/svg", "")
    server.stop()


def test_a_server_is_operated_by_keyboard_with_the_token(browser: Browser, tmp_path: Path) -> None:
    server = start(tmp_path, token_file=str(tmp_path / "token"))
    cache = join(server)
    browser.look(1400, 1000)
    browser.go(server.url)
    until(lambda: "engine-1" in browser.text())
    assert all(name for _, name in browser.controls()) and len(set(browser.controls())) == len(browser.controls())
    assert {("textbox", "token"), ("button", "end the freeze"), ("searchbox", "find a tenant")} <= set(
        browser.controls()
    )
    said = "document.getElementById('operated').textContent"

    def act(control: str, answer: str) -> None:
        browser.tab_to(control)
        browser.press("Enter")
        until(lambda: answer in browser.value(said))

    act("freeze", "show the token")
    browser.type_into("token", (tmp_path / "token").read_text())
    act("freeze", "frozen")
    until(lambda: browser.value("document.getElementById('frozen').textContent") == "frozen")
    act("end-freeze", "no longer frozen")
    browser.type_into("tenant", "acme")
    browser.type_into("quota", "2MiB")
    act("set-quota", "acme: 2.00 MiB of chunks of 64.0 KiB")
    until(lambda: "acme\t0 B\t2.00 MiB" in browser.text())
    browser.type_into("quota", "much")
    act("set-quota", "a number of bytes")
    browser.type_into("quota", "1TiB")
    act("set-quota", "quota")
    act("end-quota", "shares with all others")
    browser.type_into("tenant", "nobody/é")
    act("end-quota", "no tenant is called 'nobody/é'")
    act("drain", "no tier of type peers")
    act("reload", "it has no file of settings")
    assert [line for line in browser.complaints if "status of 4" not in line] == []
    cache.close()
    server.stop()


def test_a_prompt_is_explained(browser: Browser, tmp_path: Path) -> None:
    server = start(tmp_path, token_file=str(tmp_path / "token"))
    cache = join(server)
    tokens = list(range(600))
    scheme = ChainScheme("sha256", 256)
    space = KeySpace("m", "", "bfloat16", "f", 1, scheme.name)
    keys = space.keys(KeySequence(scheme, root=scheme.root(salt="acme")).append(tokens), tenant=tenant_tag("acme"))
    cache.commit(cache.begin_store(keys[:1], "w"))
    costs = Costs(compute=(0.01, 0.0), load=(0.0, 0.0))
    assert cache.lookup(keys, "r", shape=ChunkShape(256), costs=costs).chunks == 1
    browser.look(1400, 1000)
    browser.go(server.url)
    until(lambda: "2.6 s of prefill" in browser.text())
    uses = "[...document.querySelectorAll('#{} td')].map(cell => cell.innerText).join('|')"
    assert browser.value(uses.format("engines")) == "engine-1|1|50.0 %|64.0 KiB|2.6 s"
    digest = keys[0].digest.hex()
    assert browser.value(uses.format("prefixes")) == f"{digest[:16]}|acme|1|50.0 %|64.0 KiB|2.6 s"
    browser.type_into("token", (tmp_path / "token").read_text())
    said = "document.getElementById('explained').textContent"
    for prompt in (json.dumps(tokens), "\n".join(key.digest.hex() for key in keys)):
        browser.type_into("prompt", prompt)
        browser.type_into("salt", "acme")
        browser.tab_to("explain")
        browser.press("Space")
        until(lambda: "1 of 2 chunks are held for engine-1, tenant acme\nchunk 0: in host" in browser.value(said))
        browser.value(f"{said} = ''")
    browser.type_into("prompt", "1 2 x")
    browser.tab_to("explain")
    browser.press("Space")
    until(lambda: "a digest as kv keys prints it" in browser.value(said))
    cache.close()
    server.stop()


@contextmanager
def behind(upstream: str, prefix: str) -> Iterator[str]:
    """A reverse proxy that serves what is at `upstream` behind a prefix, and nothing else; its address."""
    client = httpx.Client(base_url=upstream, timeout=30)

    class Proxy(BaseHTTPRequestHandler):
        def forward(self) -> None:
            path, mark, query = self.path.partition("?")
            if path != prefix and not path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            url = (path.removeprefix(prefix) or "/") + mark + query
            answer = client.request(self.command, url, content=body, headers=self.headers.items())
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name not in ("connection", "content-length", "transfer-encoding", "content-encoding"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = do_PUT = do_DELETE = forward  # the names that its base calls

        def log_message(self, *_: object) -> None:
            """Not on the terminal."""

    with closing(client), ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}{prefix}"
        proxy.shutdown()


def test_all_of_it_works_behind_a_prefix_with_or_without_a_slash(browser: Browser, tmp_path: Path) -> None:
    server = start(tmp_path, token_file=str(tmp_path / "token"))
    cache = join(server)
    store(cache, 4, "a")
    said = "document.getElementById('{}').textContent"
    with behind(server.url, "/kv/node-1") as page:
        for number, address in enumerate((f"{page}?from=a+menu#tenants", f"{page}/")):
            browser.leave()
            browser.go(address)
            until(lambda: "engine-1" in browser.text())
            until(lambda: browser.value("past?.starts_s.length > 0"))  # the history's request has been answered
            before = browser.value("samples.at(-1).at")
            until(lambda before=before: browser.value("samples.at(-1).at") > before)
            browser.type_into("token", (tmp_path / "token").read_text())
            browser.type_into("tenant", "acme")
            browser.type_into("quota", f"{number + 2}MiB")
            browser.tab_to("set-quota")
            browser.press("Enter")
            until(lambda quota=number + 2: f"acme: {quota}.00 MiB" in browser.value(said.format("operated")))
            browser.type_into("tenant", "nobody/é")
            browser.tab_to("end-quota")
            browser.press("Enter")
            until(lambda: "no tenant is called 'nobody/é'" in browser.value(said.format("operated")))
            browser.type_into("prompt", key_chain(1, branch="a")[0].digest.hex())
            browser.tab_to("explain")
            browser.press("Enter")
            until(lambda: "1 of 1 chunks are held for engine-1" in browser.value(said.format("explained")))
            assert [line for line in browser.complaints if "status of 4" not in line] == []
        links = browser.value("[...document.querySelectorAll('a')].map(link => link.getAttribute('href'))")
        assert not [link for link in links if link.startswith("/")]  # they would lead out of the prefix
        browser.go(page.removesuffix("/node-1"))
        until(lambda: "404" in browser.text())
    cache.close()
    server.stop()


def test_ten_thousand_tenants_and_a_thousand_sessions_are_drawn_at_once(browser: Browser, tmp_path: Path) -> None:
    server = start(tmp_path)
    cache = join(server)
    store(cache, 3, "a")
    browser.go(server.url)
    until(lambda: "engine-1" in browser.text())
    many = """(() => {
      const [one] = latest.caches[0].tenants, [session] = latest.sessions;
      const tenant = (n) => ({ ...one, name: `tenant-${n}`, used_bytes: n });
      latest.caches[0].tenants = Array.from({ length: 10000 }, (_, n) => tenant(n));
      latest.caches[0].tenants_known = 12000;
      latest.sessions = Array.from({ length: 1000 }, (_, n) => ({ ...session, session: n }));
      $("tenants-find").value = find;
      const before = performance.now();
      show();
      return [performance.now() - before, $("tenants").querySelectorAll("tbody tr").length, $("tenants").textContent,
        $("sessions").querySelectorAll("tbody tr").length, $("sessions").textContent];
    })()"""
    took_ms, tenants, text, sessions, of_sessions = browser.value(f"find = ''; {many}")
    assert (tenants, sessions) == (50, 50) and took_ms < 500
    assert "tenant-9999" in text and "and 11,950 more" in text and "and 950 more" in of_sessions
    _, tenants, text, _, _ = browser.value(f"find = 'tenant-123'; {many}")
    assert tenants == 11 and "tenant-1230" in text
    cache.close()
    server.stop()


def contrast(one: str, other: str) -> float:
    """As WCAG counts it, of two `rgb(…)`."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.skipif("KV_PICTURES" not in os.environ, reason="KV_PICTURES names no directory for the docs' pictures")
def test_pictures_of_a_real_run(browser: Browser) -> None:
    """Not a promise but how docs/images/page.png is made: KV_PICTURES=docs/images."""
    root = Path(__file__).parents[4]
    run = subprocess.Popen(
        [sys.executable, str(root / "examples" / "4_watch_a_server.py"), "--seconds", "75"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    url = line(run.stdout).split()[2]
    browser.look(1400, 1200)
    browser.go(url)
    threading.Event().wait(65)
    directory = Path(os.environ["KV_PICTURES"])
    (directory / "page.png").write_bytes(browser.picture())
    browser.look(1400, 1200, "dark")
    (directory / "page-dark.png").write_bytes(browser.picture())
    browser.look(400, 900)
    threading.Event().wait(2)
    (directory / "page-narrow.png").write_bytes(browser.picture())
    run.stdout.close()
    run.wait(60)


def test_the_head_does_not_say_serving_alone_while_a_tier_is_down(browser: Browser, tmp_path: Path) -> None:
    redis = {"type": "redis", "url": f"redis://127.0.0.1:{free_port()}"}  # nobody listens there
    server = launch(
        {"host": {"capacity_bytes": "8MiB"}, "tiers": [redis], "http": {"listen": "127.0.0.1:0"}},
        socket=tmp_path / "s" / "kv.sock",
    )
    cache = join(server)
    store(cache, 4, "a")
    browser.go(server.url)
    until(lambda: browser.value("document.getElementById('state')?.textContent") == "serving, redis is down")
    assert browser.value("document.body.classList.contains('away')")
    assert browser.value("document.title") == "▲ kv-server: redis is down"
    cache.close()
    server.stop()
