"""The endpoint `cluster` of a server: every verb on all servers, which this one carries out as `kv cluster` does.

It finds the others by its own settings and sends them its own token, so a client that may change it may change all.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from kv_core.errors import ConfigError
from kv_server.http.endpoints import ServerView
from kv_server.http.operation import Operation, Problem
from kv_server.http.start import read_token
from kv_tiers.options import read_options

from kv_cluster.client import NotDone
from kv_cluster.here import operations_here
from kv_cluster.requests import REQUESTS, FleetRequest
from kv_cluster.verbs import MemberOutcome, open_fleet, read_url

_AT_ONCE: Final = 4
"""Verbs that one server carries out at a time: half of the requests for endpoints that it answers, as each verb may
need an answer of its own server."""


class ClusterOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As the options of `kv cluster`: url of every server's HTTP, and unprotected."""

    url: str = ""
    unprotected: bool = False


class VerbDone(msgspec.Struct, frozen=True):
    """done: every server did it. servers: what each has done, or why not."""

    done: bool
    servers: list[MemberOutcome]


def make_cluster(parameters: Mapping[str, object]) -> Sequence[Operation]:
    """The factory that `http.endpoints: [cluster]` names. Raises `ConfigError`: its parameters are not such options."""
    options = read_options(ClusterOptions, parameters, "endpoint cluster")
    if options.url:
        read_url(options.url)
    places = threading.BoundedSemaphore(_AT_ONCE)
    return [*operations_here(), *(_operation(name, body, options, places) for name, body in REQUESTS.items())]


def _operation(
    name: str, body: type[FleetRequest], options: ClusterOptions, places: threading.BoundedSemaphore
) -> Operation:
    about = " ".join((body.__doc__ or "").partition(".")[0].split())
    do = partial(carry_out, options, places)
    return Operation("POST", f"/all/{name}", f"On all servers: {about}", do, VerbDone, body, failures=(409,))


def carry_out(
    options: ClusterOptions, places: threading.BoundedSemaphore, view: ServerView, body: FleetRequest
) -> VerbDone:
    """Raises `Problem`: it could not begin."""
    if not places.acquire(blocking=False):
        raise Problem(503, f"{_AT_ONCE} verbs are being carried out; ask again", {"retry-after": "1"})
    try:
        settings = view.settings()
        token_file = Path(settings.http.token_file)
        if not token_file.exists():  # reading it would make another one
            raise Problem(409, f"http.token_file {token_file} is gone, and with it the token for the other servers")
        fleet = open_fleet(
            settings.tiers,
            settings.http.listen,
            read_token(token_file),
            peers_listen=settings.peers.listen,
            url=options.url,
            is_unprotected=options.unprotected,
            timeout_s=body.timeout_s,
        )
        outcomes = body.do(fleet)
    except (ConfigError, NotDone) as why:
        raise Problem(409, str(why)) from None
    finally:
        places.release()
    return VerbDone(bool(outcomes) and all(outcome.done for outcome in outcomes), outcomes)
