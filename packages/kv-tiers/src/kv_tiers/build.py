"""Builds a cache from settings. The only file that names concrete pools; tiers and policies are found by name."""

import dataclasses
import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from kv_core.clock import Clock
from kv_core.errors import ConfigError
from kv_core.plugins import load_plugin
from kv_eviction.coverage import BoundedGroups
from kv_eviction.registry import make_policy

from kv_tiers import chunk_header
from kv_tiers.approximate import check_approximate, check_parts, drops_parts, fingerprint_of_tier
from kv_tiers.cache.extension import Extension
from kv_tiers.cache.host import TIER
from kv_tiers.cache.local import LocalCache
from kv_tiers.cache.spill import WriteMode
from kv_tiers.codec import Codec, CodecFactory, DecodesPrefixes
from kv_tiers.config import ColdConfig, HostConfig, LaneConfig, check_lease
from kv_tiers.encryption import Cipher, read_cipher
from kv_tiers.events.bus import Source
from kv_tiers.lanes.lane import Lane
from kv_tiers.options import read_options
from kv_tiers.payload_sizes import PayloadSizes
from kv_tiers.pool.host_pool import HostPool, InheritedPool, check_capacity, pool_path, slot_bytes_for
from kv_tiers.pool.machine import spelled
from kv_tiers.tenants import Tenant, quotas_of
from kv_tiers.tier import ANY_CHUNKS, CheckedFactory, ReadOnly, ReadsPrefixes, TierContext, TierFactory

# Tiers and codecs by type: entry points, built-in or from other packages.

TIERS: Final = "kv_tiers.tiers"
CODECS: Final = "kv_tiers.codecs"


def tier_factory(type_name: str) -> TierFactory:
    """The factory of tiers of this type. Raises `ConfigError`: no installed package has the type, two do, or importing
    it fails."""
    return load_plugin(TIERS, "tier of type", type_name)


def codec_factory(name: str) -> CodecFactory:
    """The factory of the codec with this name. Raises `ConfigError`: as for `tier_factory`."""
    return load_plugin(CODECS, "codec", name)


_NUMBERS = itertools.count()


def build_local_cache(
    config: HostConfig,
    *,
    group_bytes: Sequence[int],
    fingerprint: str,
    tiers: Sequence[Mapping[str, object]] = (),
    cold: ColdConfig | None = None,
    clock: Clock | None = None,
    shared: bool = False,
    tenants: Sequence[Tenant] = (),
    events: Source | None = None,
    extensions: Sequence[Extension] = (),
    handed_over: InheritedPool | None = None,
) -> LocalCache:
    """A cache for chunks of one format. Raises `ConfigError`: the settings cannot be honoured on this machine.

    group_bytes: size of a chunk of each group, by `ChunkKey.group`.
    fingerprint: identifies the format of the chunks' bytes, of all groups together.
    tiers: the tiers below the host pool, hottest first: for each its `type`, the options of `LaneConfig`, and its own.
    events: where the cache publishes events (`kv_tiers.events`).
    shared: the pool has a descriptor by which other processes can map it (`HostPool.shared`), and no name.
    tenants: those with a quota have that much of the pool to themselves.
    extensions: what takes part in the cache besides its tiers.
    handed_over: another process's shared pool, to be used instead of a new one.
    """
    check_approximate(tiers, fingerprint)
    chunk_bytes = PayloadSizes(group_bytes).largest
    slot_bytes = slot_bytes_for(chunk_bytes)
    slots = config.capacity_bytes // slot_bytes if handed_over is None else handed_over.slots
    if slots < 1:
        raise ConfigError(
            f"a capacity of {config.capacity_bytes} bytes holds no chunk of this model, which takes {slot_bytes} "
            f"({spelled(slot_bytes)}); write a capacity of at least {slot_bytes} bytes, and for real use a thousand "
            "times that"
        )
    quotas = quotas_of(tenants)
    policy = make_policy(config.policy, max(1, slots - sum(quotas.values()) // slot_bytes))
    if config.name and not shared:
        pool = HostPool.named(
            config.name,
            chunk_bytes,
            slots,
            group_bytes=group_bytes,
            fingerprint=fingerprint,
            core_dump=config.core_dump,
        )
    elif shared:
        # Globally unique: a client that stays across a server's restart must not mistake the new pool for the old one.
        name = f"shared-{os.getpid()}-{secrets.token_hex(8)}"
        given = handed_over or InheritedPool(name, slots, max(slots, config.max_capacity_bytes // slot_bytes), -1)
        pool = HostPool.shared(
            given.name,
            chunk_bytes,
            slots,
            group_bytes=group_bytes,
            mapped_slots=given.mapped_slots,
            core_dump=config.core_dump,
            descriptor=given.descriptor,
        )
    else:
        # The name appears only in extents; this process has no other pool with this number.
        name = f"host-{os.getpid()}-{next(_NUMBERS)}"
        pool = HostPool.anonymous(name, chunk_bytes, slots, group_bytes=group_bytes, core_dump=config.core_dump)
    lanes: list[tuple[Lane, WriteMode]] = []
    bounded = BoundedGroups()
    tags = {tenant.name: tenant.tag for tenant in tenants}
    try:
        for number, options in enumerate(tiers):
            stored = fingerprint_of_tier(options, fingerprint)
            context = TierContext(chunk_bytes, pool.slot_bytes, stored, tuple(group_bytes), bounded, tags)
            lanes.append(build_lane(options, context, where=f"tiers[{number}]"))
            _check_names([lane.name for lane, _ in lanes])
        cache = LocalCache(
            pool,
            policy=policy,
            lease_s=config.lease_s,
            clock=clock,
            lanes=lanes,
            cold=cold,
            events=events,
            quotas=quotas,
            share_policy=partial(make_policy, config.policy),
            bounded=bounded,
            extensions=extensions,
        )
    except BaseException:
        for lane, _ in lanes:
            lane.close()
        pool.close()
        raise
    cache.lower.measure()
    return cache


def check_settings(config: HostConfig, tiers: Sequence[Mapping[str, object]]) -> None:
    """Check what `build_local_cache` would refuse, as far as possible without the format of the chunks and without
    writing to any medium. Raises `ConfigError`: a setting is invalid."""
    make_policy(config.policy, 1)
    check_lease(config.lease_s)
    check_capacity(max(config.capacity_bytes, config.max_capacity_bytes))
    if 0 < config.max_capacity_bytes < config.capacity_bytes:
        raise ConfigError(
            "host.max_capacity_bytes is less than host.capacity_bytes; write at least that, or leave it out"
        )
    if config.name:
        pool_path(config.name)
    check_parts(tiers)
    names: list[str] = []
    directories: dict[object, str] = {}
    for number, options in enumerate(tiers):
        where = f"tiers[{number}]"
        factory, lane_config, tier_options = _read_tier(options, where)
        _check_parts(options, _codec(lane_config, ANY_CHUNKS, where), where)
        _cipher(options, lane_config, ANY_CHUNKS, where)
        _check_peers(options, lane_config, where)
        if isinstance(factory, CheckedFactory):
            factory.check(tier_options)
        for directory in _directories(options):
            of_chunks = Path(directory).resolve(), lane_config.encryption_key_file, str(lane_config.codec)
            if (other := directories.setdefault(of_chunks, where)) != where:
                raise ConfigError(f"{where}: {directory} is {other}'s: a directory belongs to one tier; write another")
        names.append(lane_config.name)
        _check_names(names)


def _directories(options: Mapping[str, object]) -> list[str]:
    """Of a tier of disk's files."""
    given = options.get("directory", "") if options.get("type") in ("disk", "gds") else ""
    return [given] * bool(given) if isinstance(given, str) else list(map(str, given)) if isinstance(given, list) else []


def refuse_gds(tiers: Sequence[Mapping[str, object]], why: str) -> None:
    """Raises `ConfigError`: a tier is of type `gds`, whose files only an engine's own worker can read."""
    for number, tier in enumerate(tiers):
        if tier.get("type") == "gds":
            raise ConfigError(f"tiers[{number}]: type: gds {why}; write type: disk, whose chunks pass through the pool")


def build_lane(options: Mapping[str, object], context: TierContext, *, where: str) -> tuple[Lane, WriteMode]:
    """One tier behind its lane, and when chunks are written to it. where: the user's name for this place, for errors.
    Raises `ConfigError`: the options cannot be honoured."""
    factory, lane_config, tier_options = _read_tier(options, where)
    codec = _codec(lane_config, context, where)
    _check_parts(options, codec, where)
    cipher = _cipher(options, lane_config, context, where)
    _check_peers(options, lane_config, where)
    fingerprint = context.fingerprint if cipher is None else cipher.fingerprint
    stored = dataclasses.replace(context, name=lane_config.name, fingerprint=fingerprint)
    make = partial(factory, tier_options, stored)
    tier = make()
    tier.name = lane_config.name
    if lane_config.approximate and not isinstance(tier, ReadsPrefixes):
        tier.close()
        raise ConfigError(f"{where}: a tier of this type reads whole chunks only: leave out approximate")
    lane = Lane(
        tier,
        chunk_header.format_id(fingerprint),
        make=make,
        codec=codec,
        find_codec=lambda name: codec_factory(name)({}, context),
        approximate=lane_config.approximate,
        drops_parts=drops_parts(options),
        cipher=cipher,
        only_hides=lane_config.write == "never" and not isinstance(tier, ReadOnly),  # which hides chunks itself
        # One more encrypts while the others' calls are in progress, so that the medium does not wait for it.
        threads=lane_config.threads + (cipher is not None),
    )
    if isinstance(tier, ReadOnly):
        if options.get("write", "never") != "never":
            lane.close()
            raise ConfigError(f"{where}: nothing is stored in a tier of type {options['type']}; leave out write")
        return lane, "never"
    return lane, lane_config.write


def _codec(config: LaneConfig, context: TierContext, where: str) -> Codec | None:
    """The codec that encodes the tier's chunks, if any."""
    options = {"type": config.codec} if isinstance(config.codec, str) else dict(config.codec)
    name = options.pop("type", None)
    if name == "":
        return None
    if not isinstance(name, str):
        raise ConfigError(f"{where}: codec: say which, such as codec: zstd, or codec: {{type: zstd, level: 3}}")
    try:
        return codec_factory(name)(options, context)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _cipher(options: Mapping[str, object], config: LaneConfig, context: TierContext, where: str) -> Cipher | None:
    """The cipher that encrypts the tier's chunks, if any."""
    if not config.encryption_key_file:
        return None
    if config.approximate:
        raise ConfigError(
            f"{where}: first parts of an encrypted chunk cannot be verified: leave out approximate, or the key"
        )
    if options.get("type") in ("gds", "peers"):
        raise ConfigError(
            f"{where}: a tier of type {options['type']} has no encryption_key_file: what it reads is not decrypted. "
            "Write type: disk for encrypted files; what peers send is encrypted by TLS"
        )
    return read_cipher(config.encryption_key_file, context.fingerprint, where)


def _check_peers(options: Mapping[str, object], config: LaneConfig, where: str) -> None:
    if options.get("type") != "peers":
        return
    if config.codec:
        raise ConfigError(f"{where}: hosts send each other chunks as their pools hold them: leave out codec")
    if not options.get("stores") and options.get("write", "never") != "never":
        raise ConfigError(f"{where}: nothing is stored in a tier of type peers without `stores`; leave out write")


def _check_parts(options: Mapping[str, object], codec: Codec | None, where: str) -> None:
    if drops_parts(options) and not isinstance(codec, DecodesPrefixes):
        raise ConfigError(
            f"{where}: when_full: drop_parts needs chunks that are stored in parts: add codec: progressive"
        )


def _read_tier(options: Mapping[str, object], where: str) -> tuple[TierFactory, LaneConfig, dict[str, object]]:
    """The tier's factory, the options that every tier has (with its name filled in), and its own options."""
    type_name = options.get("type")
    if not isinstance(type_name, str):
        raise ConfigError(f"{where}: say which type of tier this is, such as type: disk")
    try:
        factory = tier_factory(type_name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    lane_options = set(LaneConfig.__struct_fields__)
    lane_config = read_options(LaneConfig, {name: options[name] for name in lane_options & set(options)}, where)
    tier_options = {name: value for name, value in options.items() if name not in lane_options and name != "type"}
    return factory, msgspec.structs.replace(lane_config, name=lane_config.name or type_name), tier_options


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise ConfigError(f"two tiers are called {names[-1]!r}; give each a name, such as name: {names[-1]}-2")
    if TIER in names:  # the pool's name in metrics, events and the output of `kv explain`
        raise ConfigError(f"a tier is called {TIER!r}, as the pool is; give it another name")
