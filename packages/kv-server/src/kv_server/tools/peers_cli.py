"""`kv peers`: certificates for the servers of several hosts."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kv_core.errors import ConfigError, InputError
from kv_core.log import say
from kv_core.tools.cli import add_command

if TYPE_CHECKING:
    from kv_remote.authority import Authority

_ABOUT: Final = """\
Make the certificates by which servers of several hosts know each other (docs/peers.md). DIRECTORY is made if it does
not exist. It has the authority's key, so keep it off the hosts. cert-manager or another authority does as well.

init makes a directory for each HOST: copy it to that host. Further hosts can be added later, and a host that is named
again gets a new certificate, beside which the one of before stays valid: if its key was stolen, revoke it first. revoke
has all others refuse the certificate in a host's directory: copy the new ca.pem to them; servers notice it by
themselves.
"""
_EXAMPLES: Final = """\
examples:
  kv peers init ./peers kv-a.internal kv-b.internal
  kv peers init ./peers kv-a.internal,kv-a,10.0.0.1 --days 90
  kv peers revoke ./peers kv-b.internal

HOST is what others write in hosts, or the host of directory.address; several names of one host are separated by commas.
"""
_NAME: Final = re.compile(r"[A-Za-z0-9*:]([A-Za-z0-9.:*-]{0,250}[A-Za-z0-9])?")


def register(commands: Any) -> None:
    """Add `kv peers`; called by the `kv` command."""
    parser = add_command(
        commands, "peers", _ABOUT, _EXAMPLES, help="make certificates for the servers of several hosts"
    )
    verbs = parser.add_subparsers(required=True, metavar="init|revoke")
    init = verbs.add_parser("init", help="an authority, and a certificate for each host")
    init.add_argument("directory", metavar="DIRECTORY", type=Path)
    init.add_argument("hosts", metavar="HOST", nargs="+", help="its name, or its names and addresses with commas")
    init.add_argument("--days", type=int, default=365, help="how long a certificate is valid (default: 365)")
    init.set_defaults(run=_init)
    revoke = verbs.add_parser("revoke", help="have all others refuse a host")
    revoke.add_argument("directory", metavar="DIRECTORY", type=Path)
    revoke.add_argument("host", metavar="HOST", help="its first name")
    revoke.set_defaults(run=_revoke)


def _init(args: argparse.Namespace) -> int:
    if not 1 <= args.days <= 3650:
        raise InputError(f"--days {args.days}: write 1 to 3650")
    hosts: list[list[str]] = [host.split(",") for host in args.hosts]
    for name in (name for names in hosts for name in names):
        if not _NAME.fullmatch(name) or ".." in name:
            raise InputError(f"HOST {name!r} is no name or address of a host; leave the port out")
    authority = _authority(args.directory, create=True)
    for names in hosts:
        directory = authority.issue(names, args.days)
        say(f"{names[0]}: copy {directory} there, and write into peers and into the tier of type peers")
        for kind in ("ca", "cert", "key"):
            say(f"  tls_{kind}_file: /…/{kind}.pem")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    if not _NAME.fullmatch(args.host) or ".." in args.host:
        raise InputError(f"HOST {args.host!r} is no name of a host")
    for file in _authority(args.directory, create=False).revoke(args.host):
        say(f"written: {file}")
    say(f"copy ca.pem to every host but {args.host}; until then it is accepted there")
    return 0


def _authority(directory: Path, *, create: bool) -> "Authority":
    try:
        from kv_remote.authority import Authority
    except ImportError as error:
        raise ConfigError(f"kv peers needs cryptography ({error}); pip install 'kv-server[peers]'") from None
    return Authority(directory, create=create)
