"""The verbs, on all members at once. Each says per member what happened.

None keeps a state of its own: what a verb has done is what the servers then have, so one that was interrupted is
finished by running it again.

- pin, unpin, clear, drop: one request a member, done there as a whole or not at all.
- replicate: the target fetches chunk by chunk; what has arrived stays, and is not fetched again.
- move: the source drops its copy last, once the target has been seen to have all of it.
- drain: the server goes on by itself.
"""

import queue
import re
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import msgspec
from kv_core.errors import ConfigError
from kv_remote.host_port import HostPort, read_host_port
from kv_server.peers.security import trust
from kv_server.report import DrainState, nothing_moved

from kv_cluster.client import ANSWER_S, Client, NotDone, shown
from kv_cluster.here import HeldHere, ReadsPeers
from kv_cluster.members import Finder, Member, Reach

T = TypeVar("T")

_MEMBERS_AT_ONCE: Final = 64
"""Members that a verb queries at a time: each takes a descriptor and a thread."""
_POLL_S: Final = 0.1
_SETTLE_S: Final = 15.0
"""How long a target may make no progress: the directory may not list the chunks there yet."""
_RETAIN_S: Final = 60.0
"""How long a target keeps what is moved there from eviction: longer than the source takes to drop it."""
_GRACE_S: Final = 2.0
_MAX_WARM_UP_S: Final = 3600.0
"""The longest that a server promotes for a pin."""


class PoolCounts(msgspec.Struct, frozen=True):
    slots_total: int
    slots_used: int


class TierFill(msgspec.Struct, frozen=True):
    used_bytes: int | None = None
    capacity_bytes: int | None = None


class TierShown(msgspec.Struct, frozen=True):
    name: str
    usage: TierFill


class CacheShown(msgspec.Struct, frozen=True):
    chunk_bytes: int
    fingerprint: str
    counts: PoolCounts
    tiers: list[TierShown] = []
    drain: DrainState | None = None


class ServerShown(msgspec.Struct, frozen=True):
    """Of `/status`, what the verbs use."""

    package: str
    uptime_s: float
    caches: list[CacheShown]
    opening: int = 0
    keeps: list[str] = []
    frozen: bool = False
    for_s: dict[str, float] = {}

    @property
    def fill(self) -> float:
        """Of the fullest pool."""
        pools = [cache.counts for cache in self.caches]
        return max((pool.slots_used / max(1, pool.slots_total) for pool in pools), default=0.0)

    @property
    def is_draining(self) -> bool:
        return any(cache.drain is not None for cache in self.caches)


class _Count(msgspec.Struct):
    chunks: int


class _JobState(msgspec.Struct):
    id: int
    state: str
    chunks: int = 0
    reason: str = ""


class _Hinted(msgspec.Struct):
    outcome: str
    why: str = ""
    granted: dict[str, float] = {}


class _HintedAll(msgspec.Struct):
    outcomes: list[_Hinted]


class _Drains(msgspec.Struct):
    caches: list[DrainState]


class _Anything(msgspec.Struct):
    pass


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """A prompt's chunks, of one tenant.

    keys: hex, chunk-major. tenant: its tag, hex.
    chunk_tokens, coverages, shards: as for a lookup.
    """

    keys: Sequence[str]
    tenant: str
    chunk_tokens: int = 1
    coverages: tuple[str, ...] = ("all",)
    shards: int = 1

    @property
    def chunks(self) -> int:
        return len(self.keys) // (len(self.coverages) * self.shards)

    def body(self, chunks: int | None = None, held: HeldHere | None = None, **more: object) -> dict[str, object]:
        """Of a request about the first `chunks` chunks. held: says in which format."""
        keys = self.keys[: None if chunks is None else chunks * len(self.coverages) * self.shards]
        format_ = {} if held is None else {"fingerprint": held.fingerprint, "chunk_bytes": held.chunk_bytes}
        shape = {"chunk_tokens": self.chunk_tokens, "coverages": self.coverages, "shards": self.shards}
        return {"keys": keys, **shape, **format_, **more}


@dataclass(frozen=True, slots=True)
class MemberOutcome:
    """What a member has done, or why not. facts: the same for programs."""

    server: str
    done: bool
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


Did = tuple[bool, str, dict[str, Any]]


class Fleet:
    """The members, as they answered when this was made."""

    def __init__(self, client: Client, finder: Finder, seed: str, timeout_s: float) -> None:
        """seed: the URL of a server's HTTP, which is queried for its formats if a directory lists the members.
        timeout_s: of a verb. Raises `NotDone`: the seed does not answer. Raises `ConfigError`: as for `Finder.read`."""
        self._client = client
        self._timeout_s = timeout_s
        self.finder = finder
        self.states: dict[Member, ServerShown | NotDone] = {}
        if finder.has_directory:
            known = [client.get(Member("the seed", seed), "/status", ServerShown)]
            while finder.read({(cache.chunk_bytes, cache.fingerprint) for state in known for cache in state.caches}):
                known = self._ask_new(finder.listed())
        else:
            self._ask_new(finder.listed())
        self.states = dict(sorted(self.states.items(), key=lambda one: one[0].name))

    def member(self, name: str) -> Member:
        """By its name, or its host alone. Raises `NotDone`: there is none."""
        for member in self.states:
            if name in (member.name, member.name.rpartition(":")[0]):
                return member
        raise NotDone(
            f"no server is called {name[:100]!r}; there are {', '.join(one.name for one in self.states) or 'none'}"
        )

    def health(self) -> list[MemberOutcome]:
        return [
            MemberOutcome(member.name, False, str(state))
            if isinstance(state, NotDone)
            else MemberOutcome(member.name, True, *_health(state))
            for member, state in self.states.items()
        ]

    def where(self, prefix: NamedPrefix, members: Iterable[Member]) -> list[MemberOutcome]:
        def one(member: Member) -> Did:
            held = self._held(member, prefix)
            return True, _place(held, prefix.chunks), {"chunks": held.chunks, "tiers": held.tiers}

        return self._each(members, one)

    def pin(self, prefix: NamedPrefix, name: str, members: Sequence[Member], *, is_named: bool) -> list[MemberOutcome]:
        """Pin what each holds. is_named: the operator named them, so each has to hold something."""

        def one(member: Member) -> Did:
            held = self._held(member, prefix)
            if not held.chunks:
                return not is_named, "holds none of it", {"chunks": 0}
            pinned = self._pinned(member, prefix, name, held)
            text = f"pinned {pinned} of the {held.chunks} chunks that it holds"
            text += "" if pinned == held.chunks else ": pins take half of the pool or quota at most"
            return pinned == held.chunks, text, {"chunks": pinned}

        return self._each(members, one)

    def unpin(self, name: str, tenant: str, members: Iterable[Member]) -> list[MemberOutcome]:
        def one(member: Member) -> Did:
            try:
                self._client.post(member, "/prefixes/unpin", {"name": f"{tenant}.{name}"}, _Anything)
            except NotDone as why:
                if "nothing is pinned as" not in str(why):
                    raise
                return True, "has no such pin", {"pins": 0}
            return True, "unpinned", {"pins": 1}

        return self._each(members, one)

    def replicate(self, prefix: NamedPrefix, targets: Sequence[Member]) -> list[MemberOutcome]:
        """Have these hold as much of the prefix as the server that holds most of it. Raises `NotDone`: none does."""
        most = max(self._held_by_all(prefix).values(), key=lambda held: held.chunks, default=None)
        if most is None or not most.chunks:
            raise NotDone("no server that answers holds any of it")
        return self._each(targets, lambda member: self._have(member, prefix, most))

    def copies(self, prefix: NamedPrefix, copies: int) -> list[MemberOutcome]:
        """Have so many servers hold it: those that do, and then the emptiest. Raises `NotDone`: none holds it."""
        held = self._held_by_all(prefix)
        most = max((one.chunks for one in held.values()), default=0)
        staying = {
            member: state
            for member, state in self.states.items()
            if isinstance(state, ServerShown) and not state.is_draining
        }
        holders = [member for member, one in held.items() if most and one.chunks == most and member in staying]
        others = sorted(
            (state.fill, member.name, member)
            for member, state in staying.items()
            if member not in holders and not (state.frozen or member.withheld)
        )
        chosen = [*holders, *(member for *_, member in others)][:copies]
        outcomes = self.replicate(prefix, chosen)
        if len(chosen) < copies:
            why = f"{len(chosen)} of {copies}: all other servers are down, frozen or being drained"
            outcomes.append(MemberOutcome("copies", False, why))
        return outcomes

    def move(self, prefix: NamedPrefix, source: Member, target: Member) -> list[MemberOutcome]:
        """Have the target hold what the source holds, and then the source drop it."""
        if source == target:
            raise NotDone("the source and the target are the same server")
        here, there = self._held(source, prefix), self._held(target, prefix)
        if not here.chunks:
            text = f"holds none of it, and {target.name} holds {there.chunks} chunks"
            return [MemberOutcome(source.name, bool(there.chunks), text, {"chunks": 0})]
        (arrived,) = self._each([target], lambda member: self._have(member, prefix, here, is_retained=True))
        if not arrived.done:
            text = "keeps it, as not all has arrived; run it again"
            return [arrived, MemberOutcome(source.name, False, text, {"dropped": 0})]

        def drop(member: Member) -> Did:
            now = self._held(target, prefix, for_move=True)
            if now.chunks < here.chunks:
                return False, f"keeps it, as {target.name} has lost some again; run it again", {"dropped": 0}
            count = self._client.post(member, "/endpoints/cluster/drop", prefix.body(here.chunks), _Count).chunks
            return True, f"dropped {count} chunks", {"dropped": count}

        return [arrived, *self._each([source], drop)]

    def clear(self, members: Sequence[Member], tenant: str) -> list[MemberOutcome]:
        """tenant: its tag, hex; empty: everything."""
        body: dict[str, object] = {"tenant": tenant} if tenant else {"everything": True}

        def one(member: Member) -> Did:
            chunks = self._client.post(member, "/clear", body, _Count, timeout_s=self._timeout_s).chunks
            return True, f"cleared {chunks} chunks of the pool, and all tiers below", {"chunks": chunks}

        return self._everywhere(members, one, {"tenant": tenant})

    def clear_prefix(self, prefix: NamedPrefix, members: Sequence[Member]) -> list[MemberOutcome]:
        def one(member: Member) -> Did:
            body = prefix.body(everywhere=True)
            count = self._client.post(member, "/endpoints/cluster/drop", body, _Count, timeout_s=self._timeout_s).chunks
            return True, f"cleared {count} leading chunks", {"chunks": count}

        return self._everywhere(members, one, {"keys": prefix.keys})

    def _everywhere(
        self, members: Sequence[Member], clear: Callable[[Member], Did], what: dict[str, object]
    ) -> list[MemberOutcome]:
        """A server that was cleared does not read of others what they may have from before. Once all have been cleared,
        have them read each other again."""
        outcomes = self._each(members, clear)
        if set(members) != set(self.states) or not all(outcome.done for outcome in outcomes):
            return outcomes

        def read_again(member: Member) -> Did:
            return (
                True,
                "",
                msgspec.to_builtins(self._client.post(member, "/endpoints/cluster/cleared", what, ReadsPeers)),
            )

        again = self._each(members, read_again)
        return [
            first if then.done else replace(first, done=False, text=f"{first.text}, but reads no other: {then.text}")
            for first, then in zip(outcomes, again, strict=True)
        ]

    def drain(self, member: Member, *, max_bytes: int | None) -> list[MemberOutcome]:
        def one(member: Member) -> Did:
            until_s = time.monotonic() + self._timeout_s
            body = {"timeout_s": self._timeout_s} | ({} if max_bytes is None else {"max_bytes": max_bytes})
            drains = self._client.post(member, "/drain", body, _Drains).caches
            # A cache that is being opened is drained once it is open.
            while (
                any(drain.phase == "draining" for drain in drains)
                or (state := self._client.get(member, "/status", ServerShown)).opening
            ):
                if time.monotonic() > until_s + ANSWER_S:
                    return False, f"it is still draining after {self._timeout_s:g} s, and goes on", {}
                time.sleep(_POLL_S)
                before = drains
                try:
                    drains = self._client.get(member, "/drain", _Drains).caches
                except NotDone as why:
                    raise NotDone(f"its drain has begun, and it stopped answering: {why}; run it again") from None
                if before and not drains:
                    return False, "someone ended the drain, or the server was started again", {}
            if state.keeps and not drains:
                return False, shown(nothing_moved(state.keeps)), {}
            text = (
                "; ".join(shown(drain.spelled()) for drain in drains)
                or "holds nothing: no engine has registered a format"
            )
            done = all(drain.phase == "drained" and not drain.refused for drain in drains)
            return done, text, {"caches": msgspec.to_builtins(drains)}

        return self._each([member], one, over_s=2 * ANSWER_S)

    def end_drain(self, member: Member) -> list[MemberOutcome]:
        def one(member: Member) -> Did:
            self._client.post(member, "/drain/end", None, _Drains)
            return True, "stores as before", {}

        return self._each([member], one)

    def _ask_new(self, members: Iterable[Member]) -> list[ServerShown]:
        """Query those that were not queried before; returns the answers."""
        new = [member for member in members if member not in self.states]
        answers: dict[Member, ServerShown | NotDone] = _together(
            new, lambda member: self._client.get(member, "/status", ServerShown), ANSWER_S + _GRACE_S
        )
        self.states |= answers
        return [answer for answer in answers.values() if isinstance(answer, ServerShown)]

    def _each(
        self, members: Iterable[Member], work: Callable[[Member], Did], *, over_s: float = 0.0
    ) -> list[MemberOutcome]:
        """The outcomes of all. Those that did not answer before get no request."""
        wanted = list(members)
        up = [member for member in wanted if isinstance(self.states[member], ServerShown)]
        did: dict[Member, Did | NotDone] = _together(up, work, self._timeout_s + over_s + _GRACE_S)
        outcomes = []
        for member in wanted:
            outcome = did.get(member, self.states[member])
            if isinstance(outcome, tuple):
                outcomes.append(MemberOutcome(member.name, *outcome))
            else:
                outcomes.append(MemberOutcome(member.name, False, str(outcome)))
        return outcomes

    def _held(self, member: Member, prefix: NamedPrefix, *, for_move: bool = False) -> HeldHere:
        """Raises `NotDone`."""
        state = self.states[member]
        if isinstance(state, NotDone):
            raise state
        held = self._client.post(member, "/endpoints/cluster/where", prefix.body(for_move=for_move), HeldHere)
        if not 0 <= held.chunks <= prefix.chunks:
            raise NotDone(f"it says that it holds {held.chunks} of {prefix.chunks} chunks")
        return held

    def _held_by_all(self, prefix: NamedPrefix) -> dict[Member, HeldHere]:
        """Of those that answer."""
        held = _together(list(self.states), lambda member: self._held(member, prefix), ANSWER_S + _GRACE_S)
        return {member: one for member, one in held.items() if isinstance(one, HeldHere)}

    def _have(self, member: Member, prefix: NamedPrefix, wanted: HeldHere, *, is_retained: bool = False) -> Did:
        """Have it fetch what it lacks, as it would for a request, until it holds as many chunks as `wanted`."""
        state, until_s = self.states[member], time.monotonic() + self._timeout_s
        if isinstance(state, ServerShown) and state.is_draining:
            return False, "it is being drained, and takes nothing new", {"fetched": 0}
        held = self._held(member, prefix)
        if isinstance(state, ServerShown) and state.frozen and held.chunks < wanted.chunks:
            return False, f"it is frozen, and holds only {held.chunks} of {wanted.chunks} chunks", {"fetched": 0}
        before, best, why, best_s = held.chunks, held.chunks, "", time.monotonic()
        while held.chunks < wanted.chunks:
            now_s = time.monotonic()
            if held.chunks > best:
                best, best_s = held.chunks, now_s
            if now_s > min(until_s, best_s + _SETTLE_S):
                text = f"holds {held.chunks} of {wanted.chunks} chunks, and can fetch no more{why}; run it again"
                return False, text, {"chunks": held.chunks, "fetched": held.chunks - before}
            why = self._hint(member, prefix, wanted, "kv.prefetch")
            held = self._held(member, prefix)
            if held.chunks < wanted.chunks:
                time.sleep(_POLL_S)
        if is_retained:
            self._hint(member, prefix, wanted, "kv.retain", ttl_seconds=_RETAIN_S)
            held = self._held(member, prefix)
        if held.chunks < wanted.chunks:
            return False, f"has lost some again, and holds {held.chunks} of {wanted.chunks} chunks; run it again", {}
        fetched = max(0, held.chunks - before)
        text = (
            f"has fetched {fetched} chunks, and holds {held.chunks}"
            if fetched
            else f"holds {held.chunks} chunks already"
        )
        return True, text, {"chunks": held.chunks, "fetched": fetched}

    def _hint(self, member: Member, prefix: NamedPrefix, wanted: HeldHere, kind: str, **payload: object) -> str:
        """Do this with the first chunks there. Returns why not all was done, or ""."""
        action = {"action_id": "kv-cluster", "action_type": kind, "action_version": "1.0", "payload": payload}
        envelope = {"protocol_version": "1.0", "message_id": "kv-cluster", "actions": [action]}
        body = prefix.body(wanted.chunks, wanted, tenant=prefix.tenant, hints=envelope)
        hinted, *_ = [*self._client.post(member, "/hints", body, _HintedAll).outcomes, _Hinted("rejected")]
        return f" ({shown(hinted.why)})" if hinted.why else ""

    def _pinned(self, member: Member, prefix: NamedPrefix, name: str, held: HeldHere) -> int:
        """Promote what it holds, and pin it; returns how many chunks."""
        more = {"name": f"{prefix.tenant}.{name}", "timeout_s": min(self._timeout_s, _MAX_WARM_UP_S)}
        job = self._client.post(member, "/prefixes/warm-up", prefix.body(held.chunks, held, **more), _JobState)
        until_s = time.monotonic() + self._timeout_s
        while job.state == "running":
            if time.monotonic() > until_s:
                raise NotDone(f"job {job.id} is still promoting and will pin it; run it again to see")
            time.sleep(_POLL_S)
            job = self._client.get(member, f"/prefixes/jobs/{job.id}", _JobState)
        if job.state != "done":
            raise NotDone(shown(job.reason) or "the job failed")
        return job.chunks


_URL: Final = re.compile(r"(https?)://\{host\}(?::([0-9]{1,5}))?/?")


def read_url(text: str) -> tuple[str, int]:
    """The scheme and port of every server's HTTP. Raises `ConfigError`: it is no such URL."""
    match = _URL.fullmatch(text)
    # The host is always the one that an entry's signature proves: no other can be written here.
    if match is None or not 0 < int(match[2] or 1) < 1 << 16:
        raise ConfigError(
            f"url is {text[:100]!r}: write http://{{host}}:PORT or https://{{host}}:PORT, with {{host}} as it is"
        )
    return match[1], int(match[2] or (443 if match[1] == "https" else 80))


def open_fleet(
    tiers: Iterable[Mapping[str, object]],
    listen: str,
    token: str,
    *,
    peers_listen: str = "",
    url: str = "",
    seed: str = "",
    is_unprotected: bool = False,
    timeout_s: float,
) -> Fleet:
    """The servers that these settings lead to. Raises `ConfigError`: the settings name no others, or these cannot be
    found. Raises `NotDone`: the seed does not answer.

    tiers, listen, peers_listen: of one of them (`http.listen` and `peers.listen`; empty: it has none).
    url: of every server's HTTP; empty: http, at the port of `listen`.
    seed: the URL of a server's HTTP that says which formats there are; empty: at `listen`.
    is_unprotected: as for `Reach`.
    """
    address = read_host_port(listen, "http: listen") if listen else None
    if url:
        scheme, port = read_url(url)
    elif address is not None and address.port:
        scheme, port = "http", address.port
    else:
        raise ConfigError("these settings have no http.listen with a port: give url, http://{host}:PORT")
    finder = Finder(tiers, Reach(scheme, port, is_unprotected), peers_listen)
    if not seed and finder.has_directory:
        if address is None:
            raise ConfigError("these settings have no http.listen: give --seed http://HOST:PORT of a server's HTTP")
        seed = f"http://{HostPort('127.0.0.1', address.port) if address.is_unspecified else address}"
    if seed and not re.fullmatch(r"https?://[^/?#@\s]+/?", seed):
        raise ConfigError("--seed: write http://HOST:PORT or https://HOST:PORT")
    tls = _tls(finder.ca_file) if "https" in (scheme, seed.partition(":")[0]) else []
    return Fleet(Client(token, tls), finder, seed.rstrip("/"), timeout_s)


def _tls(ca_file: str) -> list[ssl.SSLContext]:
    """For https: a certificate of the peers' authority that is not revoked, or one of the system's, which have no
    lists here."""
    contexts = [ssl.create_default_context()]
    if ca_file:
        contexts.insert(0, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        try:
            trust(contexts[0], ca_file)
        except OSError as error:
            raise ConfigError(f"peers: tls_ca_file {ca_file} cannot be used: {error}") from None
    return contexts


def _together(members: Sequence[Member], work: Callable[[Member], T], timeout_s: float) -> "dict[Member, T | NotDone]":
    """The outcomes of `work`, on a thread for each of the members under way. Once it has begun for no other within
    `timeout_s`, those still under way are left to themselves: their threads are daemons, and begin no other."""
    waiting = deque(members)
    done: queue.SimpleQueue[tuple[Member, T | NotDone]] = queue.SimpleQueue()
    until_s = time.monotonic() + timeout_s

    def run() -> None:
        nonlocal until_s
        while True:
            try:
                member = waiting.popleft()
            except IndexError:
                return
            until_s = time.monotonic() + timeout_s
            try:
                done.put((member, work(member)))
            except NotDone as why:
                done.put((member, why))
            except Exception as error:  # noqa: BLE001  # the others' outcomes are shown whatever this is
                done.put((member, NotDone(f"a bug: {shown(repr(error))}")))

    for _ in range(min(_MEMBERS_AT_ONCE, len(members))):
        threading.Thread(target=run, name="kv-cluster", daemon=True).start()
    outcomes: dict[Member, T | NotDone] = {}
    while len(outcomes) < len(members) and (left_s := until_s - time.monotonic()) > 0:
        with suppress(queue.Empty):
            member, outcome = done.get(timeout=left_s)
            outcomes[member] = outcome
    late = NotDone(f"not done within {timeout_s:g} s; what has become of it is not known: run it again")
    while waiting:
        with suppress(IndexError):  # a thread has just taken it
            outcomes[waiting.popleft()] = NotDone("not queried: too many servers before it do not answer; run it again")
    return {member: outcomes.get(member, late) for member in members}


def _health(state: ServerShown) -> tuple[str, dict[str, Any]]:
    words = [f"{shown(state.package)}, up {_span(state.uptime_s)}"]
    words.append(f"pool {state.fill:.0%} full" if state.caches else "no engine has registered")
    for cache in state.caches:
        words += [
            f"{shown(tier.name)} {tier.usage.used_bytes / tier.usage.capacity_bytes:.0%} full"
            for tier in cache.tiers
            if tier.usage.used_bytes is not None and tier.usage.capacity_bytes
        ]
        words += [shown(cache.drain.spelled())] if cache.drain is not None else []
    words += [f"{shown(what)} for {_span(for_s)}" for what, for_s in sorted(state.for_s.items())]
    words += [f"opening {state.opening} caches"] if state.opening else []
    return "; ".join(words), msgspec.to_builtins(state)


def _span(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _place(held: HeldHere, chunks: int) -> str:
    tiers = ", ".join(f"{count} in {shown(name)}" for name, count in sorted(held.tiers.items()))
    return f"holds {held.chunks} of {chunks} chunks" + (f": {tiers}" if held.chunks else "")
