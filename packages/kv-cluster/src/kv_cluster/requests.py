"""The verbs as requests, of the command and over HTTP: the parameters of each, and what it makes the fleet do.

Each `do` returns what every server has done. It raises `InputError` if its parameters contradict each other, and
`NotDone` if no server did anything.
"""

from typing import Annotated

import msgspec
from kv_core.errors import InputError
from kv_core.keys import TENANT_BYTES
from kv_server.http.prefixes import CoverageText, Keys, keys_of
from kv_tiers.options import spelled_as
from kv_tiers.payload_sizes import MAX_GROUPS
from msgspec import Meta

from kv_cluster.members import Member
from kv_cluster.verbs import Fleet, MemberOutcome, NamedPrefix

MAX_TIMEOUT_S = 30.0
"""Over HTTP, whose requests get no answer after a minute: queries of the servers before and after take the rest."""

PinName = Annotated[
    str, spelled_as(r"[A-Za-z0-9._-]{1,64}", "a name of up to 64 letters, digits, dots, dashes and underscores")
]
Tag = Annotated[
    str, spelled_as(rf"[0-9a-f]{{{2 * TENANT_BYTES}}}", f"a tag of {2 * TENANT_BYTES} lower-case hex digits")
]


class Timed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """timeout_s: of the verb."""

    timeout_s: Annotated[float, Meta(ge=0.1, le=MAX_TIMEOUT_S)] = MAX_TIMEOUT_S


class OfServers(Timed, frozen=True, kw_only=True):
    """servers: only these, by their names or hosts as health shows them; empty: all."""

    servers: list[str] = []


class OfPrefix(Timed, frozen=True, kw_only=True):
    """keys, chunk_tokens, coverages, shards: as for POST /prefixes/pin, of one tenant."""

    keys: Keys
    chunk_tokens: Annotated[int, Meta(gt=0, lt=1 << 32)] = 1
    coverages: Annotated[tuple[CoverageText, ...], Meta(min_length=1, max_length=MAX_GROUPS)] = ("all",)
    shards: Annotated[int, Meta(gt=0, le=65535)] = 1

    def prefix(self) -> NamedPrefix:
        if len(self.keys) % (self.shards * len(self.coverages)):
            raise InputError(
                f"{len(self.keys)} keys are not whole chunks of {len(self.coverages)} groups and {self.shards} shards"
            )
        tenants = {key.tenant for key in keys_of(self.keys)}
        if len(tenants) != 1:
            raise InputError("these keys are of several tenants; give those of one prompt")
        return NamedPrefix(self.keys, tenants.pop().hex(), self.chunk_tokens, self.coverages, self.shards)


class OfPrefixThere(OfPrefix, frozen=True, kw_only=True):
    """servers: as for health."""

    servers: list[str] = []


class SayHealth(OfServers, frozen=True, kw_only=True):
    """Which servers answer, and how they are."""

    def do(self, fleet: Fleet) -> list[MemberOutcome]:
        chosen = {member.name for member in _members(fleet, self.servers)}
        return [outcome for outcome in fleet.health() if outcome.server in chosen]


class FindPrefix(OfPrefixThere, frozen=True, kw_only=True):
    """Which server holds how much of a prefix, and in which tier."""

    def do(self, fleet: Fleet) -> list[MemberOutcome]:
        return fleet.where(self.prefix(), _members(fleet, self.servers))


class PinPrefix(OfPrefixThere, frozen=True, kw_only=True):
    """Keep a prefix in the pools of the servers that hold it. name: of the pin."""

    name: PinName

    def do(self, fleet: Fleet) -> list[MemberOutcome]:
        outcomes = fleet.pin(self.prefix(), self.name, _members(fleet, self.servers), is_named=bool(self.servers))
        if all(outcome.facts.get("chunks") == 0 for outcome in outcomes):
            outcomes.append(MemberOutcome("all", False, "no server holds any of it, so nothing is pinned"))
        return outcomes


class UnpinPrefix(OfServers, frozen=True, kw_only=True):
    """End a pin. tenant: the tag of its prefix, which its keys have in them."""

    name: PinName
    tenant: Tag

    def do(self, fleet: Fleet) -> list[MemberOutcome]:
        return fleet.unpin(self.name, self.tenant, _members(fleet, self.servers))


class ReplicatePrefix(OfPrefix, frozen=True, kw_only=True):
    """Have more servers hold a prefix. Either to: these; or copies: so many in all, those that hold it and the
    emptiest."""

    to: list[str] = []
    copies: Annotated[int, Meta(ge=0)] = 0

    def do(self, fleet: Fleet) -> list[MemberOutcome]:
        if bool(self.to) == bool(self.copies):
            raise InputError("give either to, servers, or copies, 1 or more")
        if self.to:
            return fleet.replicate(self.prefix(), _named(fleet, self.to))
        return fleet.copies(self.prefix(), self.copies)


class MovePrefix(OfPrefix, frozen=True, kw_only=True):
    """Have another server, the target, hold a prefix, and then the source drop it."""

    source: str
    target: str

    def do(self, fleet: Fleet) -> list[MemberOutcome]:
        return fleet.move(self.prefix(), fleet.member(self.source), fleet.member(self.target))


class ClearPrefix(OfPrefixThere, frozen=True, kw_only=True):
    """Remove a prefix."""

    def do(self, fleet: Fleet) -> list[MemberOutcome]:
        return fleet.clear_prefix(self.prefix(), _members(fleet, self.servers))


class ClearChunks(OfServers, frozen=True, kw_only=True):
    """Remove one tenant's chunks, by its tag, or everything."""

    tenant: Tag | None = None
    everything: bool = False

    def do(self, fleet: Fleet) -> list[MemberOutcome]:
        if (self.tenant is not None) == self.everything:
            raise InputError("give either a tenant, or everything")
        return fleet.clear(_members(fleet, self.servers), self.tenant or "")


class DrainServer(Timed, frozen=True, kw_only=True):
    """Move what a server holds to others before it leaves; it goes on by itself. max_bytes: of each format. end: stop
    offering, and store as before."""

    server: str
    max_bytes: Annotated[int, Meta(ge=0)] | None = None
    end: bool = False

    def do(self, fleet: Fleet) -> list[MemberOutcome]:
        member = fleet.member(self.server)
        return fleet.end_drain(member) if self.end else fleet.drain(member, max_bytes=self.max_bytes)


FleetRequest = (
    SayHealth
    | FindPrefix
    | PinPrefix
    | UnpinPrefix
    | ReplicatePrefix
    | MovePrefix
    | ClearChunks
    | ClearPrefix
    | DrainServer
)
REQUESTS: dict[str, type[FleetRequest]] = {
    "health": SayHealth,
    "where": FindPrefix,
    "pin": PinPrefix,
    "unpin": UnpinPrefix,
    "replicate": ReplicatePrefix,
    "move": MovePrefix,
    "clear": ClearChunks,
    "clear-prefix": ClearPrefix,
    "drain": DrainServer,
}
"""By the last part of their paths."""


def _members(fleet: Fleet, names: list[str]) -> list[Member]:
    return _named(fleet, names) if names else list(fleet.states)


def _named(fleet: Fleet, names: list[str]) -> list[Member]:
    """Each once. Raises `NotDone`: there is no such server."""
    return list(dict.fromkeys(fleet.member(name.strip()) for name in names))
