"""Settings: what can be set, where each value came from, and what is wrong with it.

Three places, the first that names a setting wins: the engine's own extra config for us (vLLM's
`kv_connector_extra_config`, SGLang's `--hicache-storage-backend-extra-config`), a YAML file (its path is the setting
`config_file`, or `KV_CONFIG_FILE`), environment variables (`KV_CHUNK_TOKENS`, `KV_HOST_CAPACITY`, …). Read once, at the
edge; everything below gets values.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from kv_core.errors import ConfigError
from kv_core.hashing import ChainScheme
from kv_core.log import limited_logger

from kv_tiers.config import ColdConfig, HostConfig
from kv_tiers.eviction.registry import PolicySpec
from kv_tiers.options import byte_count
from kv_tiers.pool.private_files import read_secret
from kv_tiers.tenants import read_tenants
from kv_tiers.watch.build import check as check_observe
from kv_tiers.watch.config import ObserveConfig

_log = limited_logger(__name__)


class HostSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host pool."""

    capacity: str = "4GiB"
    """How much host memory holds chunks. Reserved at start, taken from the machine as it is used."""
    name: str = ""
    """Empty: the pool ends with the engine. A name: it lies in shared memory, 0600, and the next engine finds it."""
    lease_s: float = 300.0
    """How long a chunk that was promised to a request stays put when nothing more is heard of the request."""

    policy: PolicySpec = HostConfig(capacity_bytes=0).policy
    """What leaves when room is needed; `kv sim` compares them on a trace."""

    @property
    def capacity_bytes(self) -> int:
        return byte_count(self.capacity, "host.capacity")


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cache in a process of its own."""

    socket: str = ""
    """Empty: the cache is in the engine's process, or where that has several in a private server that ends with it. A
    path: join the kv-server that listens there; host, tiers, cold, tenants and observe are then
    its own."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set."""

    chunk_tokens: int = 256
    """Tokens a chunk: the unit that is named, kept and evicted. A multiple of the engine's block size."""
    algorithm: Literal["sha256", "xxh3_128", "blake2b"] = "sha256"
    """How prefixes are named. xxh3_128 only where every caller is trusted; blake2b needs `secret_file`."""
    secret_file: str = ""
    """For blake2b: the file with the secret, at least 16 bytes, readable by its owner alone."""
    format: Literal["auto", "canonical", "blocks", "int8", "fp8"] = "auto"
    """canonical: shared between engines. blocks: this engine's blocks as they are. auto: canonical where proved. int8,
    fp8: one byte an element and a scale for each head of each token. They are lossy: what is loaded differs from what
    was stored, by 1/254 of a head's largest number in int8 and by 1/16 of each in fp8 (docs/formats/quantised.md)."""
    save_decode: bool = False
    """Keep chunks of generated tokens too, not only of prompts."""
    host: HostSettings = HostSettings()
    tiers: list[dict[str, Any]] = []
    """What is below the host pool, hottest first: of each its type (disk, redis, valkey, s3, shared_fs, dram or a third
    party's), write (through, back or never), and the options of the type."""
    cold: ColdConfig = ColdConfig()
    tenants: list[dict[str, Any]] = []
    """Who has a part of the pool alone: of each a name, one of salt_file (0600), salt and tag, and quota_bytes. The
    salt is the cache_salt that the tenant's requests carry."""
    server: ServerSettings = ServerSettings()
    observe: ObserveConfig = ObserveConfig()

    def scheme(self) -> ChainScheme:
        """How tokens become digests.

        Raises:
            ConfigError: the secret is missing, short or readable by others.
        """
        secret = b""
        if self.algorithm == "blake2b":
            if not self.secret_file:
                raise ConfigError("algorithm blake2b needs a secret: set secret_file to a file of at least 16 bytes")
            secret = _read_secret(Path(self.secret_file))
        elif self.secret_file:
            raise ConfigError(f"secret_file is set but algorithm {self.algorithm} takes none: write algorithm: blake2b")
        return ChainScheme(self.algorithm, self.chunk_tokens, secret)


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in force."""

    path: str
    value: object
    origin: str


def load(extra: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Settings, list[Setting]]:
    """The settings in force, and for each where it came from.

    Raises:
        ConfigError: an unknown key (with the nearest valid name), a value of the wrong type, or one out of range.
    """
    known = dict(_paths(Settings))
    given = _flatten(dict(extra), "the engine's extra config", {*known, "config_file"})
    file = given.pop("config_file", None) or environ.get("KV_CONFIG_FILE")
    layers: list[tuple[str, Mapping[str, object]]] = [("extra config", given)]
    if file:
        layers.append((f"file {file}", _read_file(str(file), set(known))))
    from_environ = _read_environ(environ, known)
    chosen: dict[str, tuple[object, str]] = {}
    for origin, values in layers:
        for path, value in values.items():
            chosen.setdefault(path, (value, origin))
    for path, (variable, text) in from_environ.items():
        chosen.setdefault(path, (text, f"environment {variable}"))
    tree: dict[str, Any] = {}
    for path, (value, origin) in chosen.items():
        section, _, name = path.rpartition(".")
        converted = _convert(path, value, known[path], origin)
        (tree.setdefault(section, {}) if section else tree)[name] = converted
    settings = msgspec.convert(tree, Settings)
    _check(settings)
    in_force = [
        Setting(path, _value_at(settings, path), chosen[path][1] if path in chosen else "default") for path in known
    ]
    return settings, in_force


def _check(settings: Settings) -> None:
    if settings.chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens is {settings.chunk_tokens}; it must be at least one block of the engine")
    if settings.host.lease_s <= 0:
        raise ConfigError(
            f"host.lease_s is {settings.host.lease_s}; it must be more than 0 seconds (the default is 300)"
        )
    for name in ("prefetch_share", "spill_share"):
        if not 0 < getattr(settings.cold, name) <= 1:
            raise ConfigError(f"cold.{name} is {getattr(settings.cold, name)}; write a part of the pool, such as 0.25")
    if settings.cold.wait_s < 0 or settings.cold.drain_s < 0 or settings.cold.batch_bytes < 1:
        raise ConfigError("cold.wait_s and cold.drain_s must be 0 or more seconds, and cold.batch_bytes at least 1")
    check_observe(settings.observe)
    for number, tier in enumerate(settings.tiers):
        if not isinstance(tier.get("type"), str):
            raise ConfigError(f"tiers[{number}] has no type; write one such as {{type: disk, path: …}}")
    read_tenants(settings.tenants, capacity_bytes=settings.host.capacity_bytes)
    if settings.host.capacity_bytes < 1:
        raise ConfigError("host.capacity is 0; give the pool room for at least one chunk, such as 1GiB")


def _paths(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _paths(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field.type


def _flatten(tree: Mapping[str, Any], place: str, known: set[str], prefix: str = "") -> dict[str, object]:
    """{'host': {'capacity': …}} and {'host.capacity': …} are the same setting."""
    flat: dict[str, object] = {}
    sections = {path.rpartition(".")[0] for path in known} - {""}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in sections and isinstance(value, Mapping):
            flat |= _flatten(value, place, known, f"{path}.")
        elif path in known:
            flat[path] = value
        else:
            raise ConfigError(f"{place} has an unknown setting {path!r}{_nearest(path, known | sections)}")
    return flat


def _nearest(wrong: str, known: set[str]) -> str:
    close = difflib.get_close_matches(wrong, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; the settings are {', '.join(sorted(known))}"


def _read_file(path: str, known: set[str]) -> dict[str, object]:
    import yaml

    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"the configuration file {path} must hold settings as 'name: value' lines")
    return _flatten(tree, f"the configuration file {path}", known)


def _read_environ(environ: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    variables = {f"KV_{path.replace('.', '_').upper()}": path for path in known}
    found: dict[str, tuple[str, str]] = {}
    for variable, text in environ.items():
        if variable in variables:
            found[variables[variable]] = (variable, text)
        elif variable.startswith("KV_") and variable != "KV_CONFIG_FILE":
            # The prefix is not ours alone (a Kubernetes service called kv sets KV_SERVICE_HOST), so only what looks
            # like a slip of the pen is an error.
            close = difflib.get_close_matches(variable, sorted(variables), n=1, cutoff=0.8)
            if close:
                raise ConfigError(f"the environment has {variable}, which is no setting; did you mean {close[0]}?")
    return found


def _convert(path: str, value: object, wanted: Any, origin: str) -> object:
    lax = origin.startswith("environment")  # an environment has only strings
    if wanted is str and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # capacity: 1073741824
    try:
        if lax and wanted == list[dict[str, Any]]:
            return msgspec.json.decode(str(value), type=list[dict[str, Any]])
        return msgspec.convert(value, wanted, strict=not lax)
    except msgspec.DecodeError as error:  # and ValidationError, which is one
        choices = get_args(wanted)
        hint = f"; write one of {', '.join(map(str, choices))}" if choices else ""
        shown = "not right" if path == "tenants" else repr(value)  # a salt may be in it
        raise ConfigError(f"{path} is {shown} in {origin}: {str(error).lower()}{hint}") from None


def _value_at(settings: Settings, path: str) -> object:
    value: object = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _read_secret(path: Path) -> bytes:
    secret = read_secret(path, "secret_file").strip()
    if not 16 <= len(secret) <= 64:
        raise ConfigError(f"secret_file {path} holds {len(secret)} bytes; a secret has 16 to 64")
    return secret
