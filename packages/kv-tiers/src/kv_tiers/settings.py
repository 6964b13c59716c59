"""Reads the settings: which exist, where each value came from, and what is wrong with it.

Engines and `kv-server` share one structure, so one file can serve both: each uses the sections that concern it and
validates the others. The file is YAML, TOML or JSON by its extension. An engine's settings come from three sources, of
which the first that has a value wins: its own extra config (vLLM's `kv_connector_extra_config`, SGLang's
`--hicache-storage-backend-extra-config`), a file (the setting `config_file`, or `KV_CONFIG_FILE`), and environment
variables (`KV_CHUNK_TOKENS`, `KV_HOST_CAPACITY_BYTES`, …). They are read once, at the edge; everything below receives
values.
"""

import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, get_args, get_origin

import msgspec
from kv_core.errors import ConfigError, did_you_mean
from kv_core.format import FormatSetting
from kv_core.hashing import ChainScheme
from kv_core.log import limited_logger

from kv_tiers.config import (
    Bytes,
    ColdConfig,
    CostConfig,
    Count,
    HandoverConfig,
    HostConfig,
    HttpConfig,
    JudgeConfig,
    ObserveConfig,
    PeersConfig,
    PeerSecurity,
    ServerSettings,
    Tokens,
)
from kv_tiers.options import counted, in_words
from kv_tiers.pool.private_files import read_secret
from kv_tiers.tenants import read_tenants

_log = limited_logger(__name__)

STANDARD_INPUT: Final = "-"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that can be set."""

    chunk_tokens: Count = 256
    """Tokens per chunk, the unit that is named, stored and evicted. A multiple of the engine's block size; if unset,
    one block of 64 tokens or more, else the smallest multiple from 256 on, or from 64 on in models with states
    (`kv_connect.engine`)."""
    algorithm: Literal["sha256", "xxh3_128", "blake2b"] = "sha256"
    """How prefixes are named. xxh3_128 only where every caller is trusted; blake2b needs `secret_file`. On SGLang
    sha256 only."""
    secret_file: str = ""
    """For blake2b: the file with the secret, 16 to 64 bytes, readable by its owner alone."""
    format: FormatSetting = "auto"
    """canonical: shared between engines. blocks: this engine's blocks as they are. auto: canonical where proven. int8,
    fp8: one byte per element, with a scale for each head of each token and a power of two for each channel. They are
    lossy: docs/formats/quantised.md has the bounds. SGLang's pages cannot be `blocks`."""
    judge: JudgeConfig = JudgeConfig()
    save_decode: bool = False
    """Also store chunks of generated tokens. vLLM only: SGLang's are stored unless a request says otherwise."""
    trust_media_hashes: bool = False
    """A name of 64 or 128 hex digits that a client gives its image, sound or video (`uuid`) counts as a hash of the
    content, so that every engine finds the chunks. Otherwise a client's name holds in the engine that it was sent to,
    until that ends. Only where every client is trusted. vLLM only."""
    use: Literal["auto", "always", "never"] = "auto"
    """When held chunks are used. auto: if loading them, with the wait for lower tiers, is estimated to be quicker than
    computing them (docs/cost.md). always: all held chunks are loaded, after a wait of up to `cold.wait_s`. never:
    nothing is loaded. A request may override it (docs/requests.md)."""
    load: Literal["async", "layerwise", "auto"] = "async"
    """When chunks are copied to the engine's blocks. async: between its steps, and the request waits. layerwise: in the
    step that computes the rest of the request, each layer while those before it are computed. auto: layerwise if it is
    estimated to hide the copy, or if no other request would wait for it. vLLM only, on one node, without pipeline
    stages and with one kind of layers; elsewhere always async (docs/contracts/vllm.md#layerwise-loads)."""
    store: Literal["async", "layerwise", "lazy"] = "async"
    """When chunks are copied from the engine's blocks. async: after the step that completes them. layerwise: in this
    step, each layer while those after it are computed, so that they can be found sooner; chunks in int8 and fp8 always
    after it (docs/contracts/vllm.md#layerwise-stores). lazy: when the engine overwrites them
    (docs/contracts/vllm.md#lazy-stores). vLLM only."""
    min_load_tokens: Tokens = 0
    """A smaller hit is computed instead of loaded. vLLM only, like the two below; SGLang has its own
    `prefetch_threshold`. A request may override it (docs/requests.md)."""
    min_store_tokens: Tokens = 0
    """A shorter prompt is not stored; with `save_decode`, a shorter request."""
    max_store_tokens: Tokens = 0
    """Tokens of a request beyond this number are not stored; 0: no limit."""
    stores_in_flight_bytes: Bytes | None = None
    """How much each worker may have in flight from its device to the pool while the engine continues with the next
    steps. Chunks beyond that are not stored. If unset, 2 GiB more than the KV of one step. 0: a step ends when all that
    it stores is in the pool. vLLM only."""
    host: HostConfig = HostConfig()
    tiers: list[dict[str, Any]] = []
    """The tiers below the host pool, hottest first: for each its type (disk, redis, valkey, s3, mooncake, shared_fs,
    peers, dram or another package's), name, write (through, back or never) and threads, and the options of the type."""
    cold: ColdConfig = ColdConfig()
    cost: CostConfig = CostConfig()
    handover: HandoverConfig = HandoverConfig()
    tenants: list[dict[str, Any]] = []
    """Tenants with names and quotas: for each a name, one of salt_file (0600), salt and tag, and quota_bytes. The salt
    is the cache_salt of the tenant's requests."""
    observe: ObserveConfig = ObserveConfig()
    server: ServerSettings = ServerSettings()
    peers: PeersConfig = PeersConfig()
    http: HttpConfig = HttpConfig()

    def scheme(self) -> ChainScheme:
        """How tokens become digests. Raises `ConfigError`: the secret is missing, short or readable by others."""
        secret = b""
        if self.algorithm == "blake2b":
            if not self.secret_file:
                raise ConfigError("algorithm blake2b needs a secret: set secret_file to a file of at least 16 bytes")
            secret = read_secret(Path(self.secret_file), "secret_file")
            if not 16 <= len(secret) <= 64:
                raise ConfigError(f"secret_file {self.secret_file} holds {len(secret)} bytes; a secret has 16 to 64")
        elif self.secret_file:
            raise ConfigError(f"secret_file is set but algorithm {self.algorithm} takes none: write algorithm: blake2b")
        return ChainScheme(self.algorithm, self.chunk_tokens, secret)


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in force.

    path: its name, with its section: `host.capacity_bytes`.
    value: as the settings have it.
    origin: "default", "extra config", "file …", "environment KV_…" or "the command line".
    """

    path: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one place.

    origin: the place, as errors and `kv config` call it.
    tree: the settings by name, nested or with a dot.
    """

    origin: str
    tree: Mapping[str, Any]


_FILE: Final = "KV_CONFIG_FILE"


def load(extra: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Settings, list[Setting]]:
    """An engine's settings in force, and for each where it came from. Raises `ConfigError`: an unknown key (with the
    nearest valid name), a value of the wrong type, or one out of range."""
    options = dict(extra)
    file = options.pop("config_file", None) or environ.get(_FILE)
    layers = [Layer("extra config", options)]
    if file:
        _check_text("config_file", str(file), "extra config")
        layers.append(Layer(f"file {file}", read_file(str(file))))
    settings, in_force = resolve(layers, environ)
    if settings.server.url:
        settings, in_force = _with_remote_server(settings, in_force)
    for path, listen in (("http.listen", settings.http.listen), ("peers.listen", settings.peers.listen)):
        if listen and not settings.server.socket:
            _log.warning(
                "%s is %s, but an engine serves nothing there: start kv-server with these settings, and write "
                "server.socket for the engine to join it",
                path, listen,
            )  # fmt: skip
    return settings, in_force


_URL: Final = re.compile(r"kvs://((\[[0-9A-Fa-f:.]+\]|[^][:/?#@\s]+):[1-9][0-9]{0,4})/?")
_SMALL_POOL_BYTES: Final = 1 << 30


def _with_remote_server(settings: Settings, in_force: Sequence[Setting]) -> tuple[Settings, list[Setting]]:
    """What `server.url` stands for: a small pool, unless its size is given, and a tier that stores at that server.
    Raises `ConfigError`: it is not such a URL, a server of this host is named, too, or the small pool has no room for
    the tenants' quotas."""
    server, match = settings.server, _URL.fullmatch(settings.server.url)
    if server.socket:
        raise ConfigError("server.socket is a kv-server on this host, server.url one on another: leave one of them out")
    if match is None:  # there may be a password in it
        shown = "not right: a certificate is used, and no name or password" if "@" in server.url else repr(server.url)
        raise ConfigError(f"server.url is {shown}; write kvs://HOST:PORT, such as kvs://kv-a.internal:9500")
    security = {name: value for name in PeerSecurity.__struct_fields__ if (value := getattr(settings.peers, name))}
    there = {"hosts": [match[1]], "stores": True, "answer_timeout_s": server.answer_s}
    tier = {"type": "peers", "name": "server", **there, **security}
    is_sized = any(entry.path == "host.capacity_bytes" and entry.origin != "default" for entry in in_force)
    host = settings.host if is_sized else msgspec.structs.replace(settings.host, capacity_bytes=_SMALL_POOL_BYTES)
    read_tenants(settings.tenants, capacity_bytes=host.capacity_bytes)
    whole = msgspec.structs.replace(settings, host=host, tiers=[*settings.tiers, tier])
    now = [(entry, attrgetter(entry.path)(whole)) for entry in in_force]
    return whole, [entry if value == entry.value else Setting(entry.path, value, "server.url") for entry, value in now]


def resolve(layers: Sequence[Layer], environ: Mapping[str, str]) -> tuple[Settings, list[Setting]]:
    """The settings from the layers and then the environment, and the source of each. The first that has a value wins.
    Raises `ConfigError`: as for `load`."""
    known = dict(_paths(Settings))
    chosen: dict[str, tuple[object, str]] = {}
    for layer in layers:
        layer_paths: set[str] = set()
        for path, value in _flatten(layer.tree, layer.origin, set(known)):
            if path in layer_paths:
                raise ConfigError(f"{path} appears twice in {layer.origin}, once with a dot; leave one of them out")
            layer_paths.add(path)
            chosen.setdefault(path, (_convert(path, value, known[path], layer.origin), layer.origin))
    for path, variable, text in _read_environ(environ, known):
        origin = f"environment {variable}"
        chosen.setdefault(path, (_convert(path, text, known[path], origin, is_text=True), origin))
    tree: dict[str, Any] = {}
    for path, (value, _) in chosen.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    settings = msgspec.convert(tree, Settings)
    tenants = {tenant.name for tenant in read_tenants(settings.tenants, capacity_bytes=settings.host.capacity_bytes)}
    for number, tier in enumerate(settings.tiers):
        if not isinstance(tier.get("type"), str):
            raise ConfigError(f"tiers[{number}] has no type; write one such as {{type: disk, directory: …}}")
        if isinstance(quotas := tier.get("quota_bytes"), dict) and (unknown := quotas.keys() - tenants):
            name = min(map(str, unknown))
            raise ConfigError(f"tiers[{number}]: quota_bytes: no tenant is called {name!r}; list it in tenants")
    in_force = [
        Setting(path, attrgetter(path)(settings), chosen[path][1] if path in chosen else "default") for path in known
    ]
    return settings, in_force


def read_file(path: str) -> dict[str, Any]:
    """The settings in a file, YAML, TOML or JSON by its extension; `-` is standard input, JSON or YAML. Raises
    `ConfigError`: it cannot be read, or is not of the kind that its name indicates."""
    source = "standard input" if path == STANDARD_INPUT else f"the configuration file {path}"
    if path == STANDARD_INPUT and sys.stdin is None:
        raise ConfigError(f"{source} is closed; name a file instead of -")
    try:
        text = sys.stdin.read() if path == STANDARD_INPUT else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8: {error}") from None
    suffix = Path(path).suffix
    if path == STANDARD_INPUT:
        suffix = ".json" if text.lstrip().startswith("{") else ".yaml"
    try:
        tree = _parse(text, suffix)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply for settings") from None
    except ValueError as error:  # all three parsers raise this or a subclass
        raise ConfigError(f"{source} is not {_LANGUAGES[suffix]}: {error}") from None
    except KeyError:
        raise ConfigError(f"{source} is of an unknown kind; end its name in {', '.join(_LANGUAGES)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{source} must hold settings, each with its name")
    return tree


_LANGUAGES: Final = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML", ".json": "JSON"}


def _parse(text: str, suffix: str) -> Any:
    """A repeated name is an error in every language: one of its values would be ignored."""
    match _LANGUAGES[suffix]:
        case "TOML":
            return tomllib.loads(text)
        case "JSON":
            return json.loads(text, object_pairs_hook=_without_repeats)
    import yaml  # here, because a server that reads JSON starts sooner without it
    from yaml.parser import ParserError
    from yaml.scanner import ScannerError

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            _without_repeats((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506  # a safe one
    except yaml.MarkedYAMLError as error:
        # Its own text repeats the line, and the name of an alias or a tag: there may be a salt in them.
        is_grammar = isinstance(error, ParserError | ScannerError)
        why = error.problem if is_grammar else "an alias, a tag or a key that cannot be read"
        mark = error.problem_mark
        where = "" if mark is None else f" (at line {mark.line + 1}, column {mark.column + 1})"
        raise ValueError(f"{why}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in pairs:
        if name in tree:
            raise ValueError(f"{name!r} appears twice")
        tree[name] = value
    return tree


def _paths(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _paths(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field.type


def _flatten(tree: Mapping[str, Any], origin: str, known: set[str], prefix: str = "") -> Iterator[tuple[str, object]]:
    """{'host': {'capacity_bytes': …}} and {'host.capacity_bytes': …} are the same setting."""
    sections = {path.rpartition(".")[0] for path in known} - {""}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in sections:
            if not isinstance(value, Mapping | None):
                shown = repr(value) if isinstance(value, str | int | float) else "a list"
                raise ConfigError(f"{path} is {shown} in {origin}; it must hold settings, each with its name")
            yield from _flatten(value or {}, origin, known, f"{path}.")
        elif path in known:
            if value is not None:  # YAML has None where everything below is commented out
                yield path, value
        else:
            raise ConfigError(f"there is no setting {path!r} (in {origin}); {did_you_mean(path, known | sections)}")


def _read_environ(environ: Mapping[str, str], known: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The path, variable and text of each setting in the environment."""
    variables = {f"KV_{path.replace('.', '_').upper()}": path for path in known}
    for variable, text in environ.items():
        if variable in variables:
            yield variables[variable], variable, text
        elif variable.startswith("KV_") and variable != _FILE and not _is_service_link(variable, text):
            # The prefix is not ours alone, so only a likely typo is an error.
            close = difflib.get_close_matches(variable, sorted([*variables, _FILE]), n=1, cutoff=0.82)
            if close:
                raise ConfigError(f"the environment has {variable}, which is no setting; did you mean {close[0]}?")


_SERVICE_LINK: Final = re.compile(
    r"\w+_SERVICE_HOST=[^/\s]+"
    r"|\w+_SERVICE_PORT(_\w+)?=[0-9]{1,5}"
    r"|\w+_PORT(_[0-9]{1,5}_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://\S+"
    r"|\w+_PORT_[0-9]{1,5}_(TCP|UDP|SCTP)_(PROTO=(tcp|udp|sctp)|PORT=[0-9]{1,5}|ADDR=[^/\s]+)"
)


def _is_service_link(variable: str, text: str) -> bool:
    """Whether Kubernetes sets this, in every container of a namespace that has a service called kv or kv-…."""
    return _SERVICE_LINK.fullmatch(f"{variable}={text}") is not None


def _convert(path: str, value: object, wanted: Any, origin: str, *, is_text: bool = False) -> object:
    """is_text: the value is text, as all values in the environment are."""
    try:
        if is_text and (get_origin(wanted) is list or _may_be_parameters(wanted, str(value))):
            value, is_text = msgspec.json.decode(str(value), type=wanted), False
        _check_text(path, value, origin)
        value = counted(path, value, path, wanted)
        return msgspec.convert(value, wanted, strict=not is_text)
    except RecursionError:
        raise ConfigError(f"{path} in {origin} is nested too deeply for a setting") from None
    except (msgspec.DecodeError, UnicodeEncodeError) as error:  # and ValidationError, which is one of the first
        choices = get_args(wanted) if get_origin(wanted) is Literal else ()
        hint = f"; write one of {', '.join(choices)}" if choices else ""
        if path == "tiers":
            hint = "; write a list of them, such as [{type: disk, directory: /kv, capacity_bytes: 100GiB}]"
        # A list or a mapping may have a salt or a password in it, and so may the text of one.
        is_plain = get_origin(wanted) is not list and isinstance(value, str | int | float)
        shown = repr(value) if is_plain else "not right"
        raise ConfigError(f"{path} is {shown} in {origin}: {in_words(error).lower()}{hint}") from None


def _may_be_parameters(wanted: Any, text: str) -> bool:
    """Of a setting that is a name, or a mapping with a name and parameters."""
    return isinstance(wanted, UnionType) and text.lstrip().startswith("{")


def _check_text(path: str, value: object, origin: str) -> None:
    """Raises `ConfigError`: text in it cannot be the name of a file or a host."""
    if isinstance(value, str):
        try:
            is_bad = b"\0" in os.fsencode(value)
        except UnicodeEncodeError:
            is_bad = True
        if is_bad:
            raise ConfigError(f"{path} in {origin} has a character that no name may contain, such as \\0; leave it out")
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name != "salt":  # a salt may be any text
                _check_text(path, part, origin)
    elif isinstance(value, list):
        for part in value:
            _check_text(path, part, origin)
