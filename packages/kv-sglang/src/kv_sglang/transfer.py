"""SGLang's transfer backend `kv`: its bootstrap, heartbeat and states are SGLang's own, the pages go through the cache.

SGLang creates one manager per rank, and a sender or receiver per request. The engines exchange only short messages,
over the sockets that SGLang's managers have for them: the decode engine reports its address, the prefill engine how
many pages of the prompt are in the cache and, with the last of them, SGLang's metadata, which contain the first token.
Each side names the prompt's pages itself, from its own request, so no message can cause other pages to be loaded.

SGLang names a request by the number of its room, which a later request may be given while messages about the first are
still on their way: a router may repeat a request with the same number. So the decode engine draws an attempt for each
request, and every message about the request has it. What comes with another attempt is about an earlier request. While
an engine has the earlier request it refuses the later one, since SGLang keeps what it knows of both under that number.
"""

import ctypes
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, cast

import msgspec
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.config import HandoverConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    ABORT_TAG,
    AbortNotification,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import get_device_module
from sglang.srt.utils.network import NetworkAddress

from kv_sglang.attach import KV, Rank, attach, check_hashes
from kv_sglang.cli import read_settings
from kv_sglang.exchange import Exchange, IncomingRoom, Lanes, OutgoingRoom
from kv_sglang.lanes import Point
from kv_sglang.names import Names, why_names_do_not_suffice
from kv_sglang.pools import DevicePool, describe_device
from kv_sglang.served import served_model
from kv_sglang.weights import engine_name, watch_updates

_log = limited_logger(__name__)

_BATCH_BYTES: Final = 16 << 20
"""Bytes stored before the other side is notified, and bytes copied while a room cannot be closed."""
STATUS: Final = b"KV_STATUS"
READY: Final = b"KV_READY"
PAGES: Final = b"KV_PAGES"
ABORTED: Final = b"KV_ABORTED"
Room = TypeVar("Room", OutgoingRoom, IncomingRoom)
_STATUS_FRAMES: Final = 5
"""SGLang's own: tag, room, status, rank, reason. The attempt follows them."""


@dataclass(slots=True)
class DecodePeer:
    """A rank of a decode engine that waits for a request. The names are those that SGLang's classes look for.

    prefix_tokens: those that it has already.
    attempt: its latest.
    """

    endpoint: str
    dst_port: int
    prefix_tokens: int
    is_dummy: bool
    attempt: bytes

    @property
    def address(self) -> str:
        return f"{self.endpoint}:{self.dst_port}"


@dataclass(frozen=True, slots=True)
class DecodeReady:
    """A decode engine has blocks for a prompt. required: how many of its ranks say so."""

    room: int
    required: int
    peer: DecodePeer

    def frames(self) -> list[bytes]:
        return [READY, msgspec.msgpack.encode(self)]


@dataclass(frozen=True, slots=True)
class DecodeAborted:
    """A rank of a decode engine has given up a request. address: its own. attempt: None: not known."""

    room: int
    address: str
    attempt: bytes | None

    @classmethod
    def read(cls, message: Sequence[bytes]) -> "DecodeAborted | None":
        """None: it is another message."""
        if message[0] == ABORT_TAG:  # SGLang's own, where it does not ask the receiver for it
            abort = AbortNotification.from_zmq(list(message))
            return None if abort is None else cls(abort.room, f"{abort.decode_ip}:{abort.decode_port}", None)
        return msgspec.msgpack.decode(message[1], type=cls) if message[0] == ABORTED else None

    def frames(self) -> list[bytes]:
        return [ABORTED, msgspec.msgpack.encode(self)]


@dataclass(frozen=True, slots=True)
class PagesStored:
    """What a rank of a prefill engine says of a prompt.

    pages: how many of its pages are in the cache.
    last: the name of the last of them.
    weights: the revision of the weights with which they were computed.
    metadata: SGLang's, with the last page.
    """

    room: int
    attempt: bytes
    rank: int
    pages: int
    last: str
    weights: str
    metadata: Sequence[bytes]

    def frames(self) -> list[bytes]:
        return [PAGES, msgspec.msgpack.encode(self)]


def attempt_of_status(message: Sequence[bytes]) -> bytes:
    """The attempt that SGLang's message of a status is about; empty if it does not say."""
    return message[_STATUS_FRAMES] if len(message) > _STATUS_FRAMES else b""


def refuse_what_is_not_served(args: Any, server_args: Any) -> None:
    """
    Raises:
        ConfigError: pages of this model, or with this parallelism, are not handed over.
    """
    unnamed = why_names_do_not_suffice(ModelConfig.from_server_args(server_args))
    parallel = get_parallel()  # the arguments are as they were given, and several spellings mean the same
    refused = {
        f"a model with {unnamed}": bool(unnamed),
        "a model with " + ", ".join(str(kind.value) for kind in args.state_types): bool(args.state_types),
        "a draft model's KV": bool(args.num_draft_entries),
        "pipeline parallelism": parallel.pp_size > 1,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "data-parallel attention": parallel.attn_dp_size > 1,
    }
    if found := [what for what, is_so in refused.items() if is_so]:
        raise ConfigError(
            f"kv-sglang does not hand over with {' and '.join(found)}: choose another --disaggregation-transfer-backend"
        )


class KVManager(CommonKVManager):  # type: ignore[misc]  # the engine's classes are untyped here
    """The manager of one rank."""

    kv_status_msg_tag = STATUS
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True
    _lanes: Lanes | None = None
    _reads_together = _releases_holds = False

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        """
        Raises:
            ConfigError: pages of this model, or with this parallelism, cannot be handed over.
        """
        refuse_what_is_not_served(args, server_args)
        check_hashes()
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self._outgoing: dict[int, OutgoingRoom] = {}
        self._incoming: dict[int, IncomingRoom] = {}
        self._rooms = threading.Lock()
        self._batch_pages = 1

    # Start-up.

    def attach_pool(self, pool: Any, allocator: Any, forward_stream: Any) -> None:
        """Join the cache and start. pool: the engine's, on the device. allocator: cleared when its caches are emptied.
        forward_stream: of its forward passes.

        Raises:
            ConfigError: the settings cannot be honoured, or the pool cannot be described.
        """
        settings = read_settings({}, int(self.kv_args.page_size), os.environ)
        if not settings.server.socket:
            raise ConfigError(
                "the engines of a hand-over share a kv-server, and none is configured: set server.socket in the file "
                "that KV_CONFIG_FILE names, or KV_SERVER_SOCKET"
            )
        described = describe_device(pool, int(self.kv_args.page_size), settings.format)
        watch_updates()
        rank = Rank.here(int(self.attn_tp_rank), int(self.attn_tp_size), replicated=described.replicated)
        is_prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        self._reads_together = described.replicated and rank.ranks > 1 and not is_prefill
        self._releases_holds = self._reads_together and rank.number == 0
        attached = attach(
            settings,
            served_model(rank),
            rank,
            {KV: described.pages},
            engine_name=engine_name(rank.ranks),
            reads_together=self._reads_together,
        )
        assert attached.watch is not None
        attached.watch.watch_for_clear(allocator)
        self._attached, self._watch = attached, attached.watch
        self._forward_stream = forward_stream
        self._batch_pages = max(1, _BATCH_BYTES // described.pages.format.nbytes)
        self._lanes = Lanes(partial(self._exchange, described, settings.handover))
        threading.Thread(
            target=self._listen,
            args=(self._on_decode_message if is_prefill else self._on_prefill_message,),
            daemon=True,
        ).start()
        if not is_prefill:
            self._start_heartbeat_checker_thread()
        _log.info("kv-sglang hands over pages of %d tokens", settings.chunk_tokens)

    def _exchange(self, described: DevicePool, handover: HandoverConfig) -> Exchange:
        store, in_doubt = self._attached.stores[KV], self._watch.holds_old_pages
        return Exchange(store, described.copier(), in_doubt, wait_s=handover.wait_s, hold_s=handover.hold_s)

    def _listen(self, handle: Any) -> None:
        while True:
            message = self.server_socket.recv_multipart()
            try:
                handle(message)
            except Exception:  # noqa: BLE001  # any process that reaches the port may send anything
                _log.exception("a message about a hand-over could not be handled")

    # The prefill engine's side.

    def add_outgoing(self, room: int, names: Names) -> bool:
        """False: an earlier request still has this number."""
        return self._add(self._outgoing, room, OutgoingRoom(room, names))

    def _on_decode_message(self, message: Sequence[bytes]) -> None:
        if (aborted := DecodeAborted.read(message)) is not None:
            self._decode_aborted(aborted)
        elif message[0] == READY:
            self._decode_ready(msgspec.msgpack.decode(message[1], type=DecodeReady))

    def _decode_aborted(self, aborted: DecodeAborted) -> None:
        room, status = aborted.room, self.request_status.get(aborted.room)
        peer = self.transfer_infos.get(room, {}).get(aborted.address)
        # Until the decode engine has registered, any engine may abort the request.
        is_current = status == KVPoll.Bootstrapping if peer is None else aborted.attempt in (None, peer.attempt)
        if not is_current or status in (KVPoll.Success, KVPoll.Failed):
            return  # late: perhaps about an earlier request with the same room number
        if room in self._outgoing or status == KVPoll.Bootstrapping:
            self.record_failure(room, "the decode engine aborted the request")
            self.update_status(room, KVPoll.Failed)
        else:  # it may never start, or be retried under the same room number
            for known in (self.request_status, self.transfer_infos, self.req_to_decode_prefix_len):
                known.pop(room, None)

    def _decode_ready(self, ready: DecodeReady) -> None:
        room, peer = ready.room, ready.peer
        status = self.request_status.get(room)
        is_awaited = status == KVPoll.WaitingForInput and room not in self._outgoing  # and was announced before
        if status in (None, KVPoll.Bootstrapping) or is_awaited:
            peers = self.transfer_infos.setdefault(room, {})
            peers[peer.address] = peer
            if len(peers) >= ready.required:
                self.req_to_decode_prefix_len[room] = max(each.prefix_tokens for each in peers.values())
                self.update_status(room, KVPoll.WaitingForInput)
            return
        known = self.transfer_infos.get(room, {}).get(peer.address)
        if known is not None and known.attempt == peer.attempt:
            return
        is_served = status in (KVPoll.WaitingForInput, KVPoll.Transferring)
        if is_served and known is not None and known.prefix_tokens == peer.prefix_tokens:
            known.attempt = peer.attempt  # a retry, for the same pages
        elif not peer.is_dummy:
            # Otherwise it would wait until its time-out.
            self._fail_peer(peer, room, "kv-sglang could not hand over: an earlier request still has the same number")

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        *,
        aux_index: int | None = None,
        wait_event: Any = None,
        **_unused: Any,
    ) -> None:
        """kv_indices: the blocks of the prompt's pages `index_slice`, counted from the first that the decode engine
        lacks."""
        page_size = int(self.kv_args.page_size)
        with self._rooms:
            outgoing = self._outgoing.get(bootstrap_room)
        if outgoing is None:
            return  # aborted
        job = partial(
            self._hand_over,
            outgoing=outgoing,  # not the room number, which another request may have by the time these are stored
            start=int(index_slice.start),
            slots=[int(block) * page_size for block in kv_indices],
            aux_index=aux_index if is_last_chunk else None,
            # SGLang gives no event where its own engines need none, and the lane's stream is behind no forward pass.
            computed=self.after_forward() if wait_event is None else wait_event,
        )
        assert self._lanes is not None
        self._lanes.add(bootstrap_room, job)

    def _hand_over(
        self,
        exchange: Exchange,
        outgoing: OutgoingRoom,
        *,
        start: int,
        slots: list[int],
        aux_index: int | None,
        computed: Point,
    ) -> None:
        peers = list(self.transfer_infos.get(outgoing.room, {}).values())
        if not peers or self.request_status.get(outgoing.room) in (None, KVPoll.Failed):
            return  # aborted
        try:
            computed.synchronize()
            why = self._store(exchange, outgoing, peers, start=start, slots=slots, aux_index=aux_index)
        except Exception as error:  # noqa: BLE001  # SGLang must learn of any error
            _log.exception("pages of a hand-over could not be stored")
            why = f"{type(error).__name__}: {error}"
        if why or aux_index is not None:
            self._conclude(outgoing, peers, why)

    def _conclude(self, outgoing: OutgoingRoom, peers: Sequence[DecodePeer], why: str) -> None:
        """Report the outcome to SGLang. why: the failure; empty: all pages are stored."""
        room, reason = outgoing.room, f"kv-sglang could not hand over: {why}"
        with outgoing.lock:
            # A closed room's number may belong to another request. A failed one can only fail again.
            if not outgoing.is_open and self.request_status.get(room) != KVPoll.Failed:
                return
            if not why:
                self.update_status(room, KVPoll.Success)
                return
            if self.conclude_failure(bootstrap_room=room, failure_reason=reason, targets=[]) is None:
                return  # closed and cleared in the meantime
            with self.failure_lock:
                reason = self.failure_records.get(room, reason)  # the first failure's
        # Outside the lock, which SGLang's scheduler takes: sending to a peer that is gone may block.
        for peer in peers:
            if not peer.is_dummy:
                self._fail_peer(peer, room, reason)

    def _store(
        self,
        exchange: Exchange,
        outgoing: OutgoingRoom,
        peers: Sequence[DecodePeer],
        *,
        start: int,
        slots: list[int],
        aux_index: int | None,
    ) -> str:
        """Store pages and notify the peers. Empty, or why not all pages are stored."""
        names = outgoing.names
        first = start + max(peer.prefix_tokens for peer in peers) // int(self.kv_args.page_size)
        targets = [peer for peer in peers if not peer.is_dummy]
        for at in range(0, len(slots), self._batch_pages):
            part = slots[at : at + self._batch_pages]
            if why := exchange.put(names, first + at, part, lambda: outgoing.is_open):
                return why
            if outgoing.is_open:
                self._announce_pages(targets, outgoing, first + at + len(part), [])
        if aux_index is not None:
            done = first + len(slots)
            if done != len(names.hashes):
                return f"{done} pages were computed, and the prompt has {len(names.hashes)}"
            with outgoing.lock:
                if not outgoing.is_open:  # the metadata slot may belong to another request
                    return "the request has ended"
                metadata = self._metadata(aux_index)
            self._announce_pages(targets, outgoing, done, metadata)
        return ""

    def _announce_pages(
        self, peers: Sequence[DecodePeer], outgoing: OutgoingRoom, pages: int, metadata: Sequence[bytes]
    ) -> None:
        """Notify the peers that pages up to this number are in the cache."""
        room, rank, last = outgoing.room, self._prefill_unique_rank(), outgoing.names.hashes[pages - 1]
        weights = self._attached.stores[KV].revision
        for peer in peers:
            self._send(peer, PagesStored(room, peer.attempt, rank, pages, last, weights, metadata).frames())

    def _fail_peer(self, peer: DecodePeer, room: int, reason: str) -> None:
        status = self._encode_kv_status_message(bootstrap_room=room, status=KVPoll.Failed, failure_reason=reason)
        try:
            self._send(peer, [*status, peer.attempt])
        except Exception as error:  # noqa: BLE001  # the peer has a time-out of its own
            _log.warning("%s could not be notified of a failed hand-over: %s", peer.address, error)

    def _send(self, peer: DecodePeer, message: list[bytes]) -> None:
        address = NetworkAddress(peer.endpoint, peer.dst_port)
        self._send_multipart_locked(address.to_tcp(), message, is_ipv6=address.is_ipv6)

    def _metadata(self, index: int) -> list[bytes]:
        """The data that SGLang hands over besides the KV: the first token and its details."""
        args = self.kv_args
        return [
            ctypes.string_at(address + index * nbytes, nbytes)
            for address, nbytes in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
        ]

    # The decode engine's side.

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """Never. SGLang's checksum is of whole pages: here the rest of a partial page is the prompt's own tokens again,
        and a page that was in the cache before may have been rounded otherwise. The cache has its own checksums."""
        return False

    def add_incoming(self, room: int, incoming: IncomingRoom) -> bool:
        """False: an earlier request still has this number."""
        return self._add(self._incoming, room, incoming)

    def after_forward(self) -> Point:
        """The point at which the forward passes in flight are over. They compute the pages of a hand-over, or may still
        write the last token of a request that has ended, to a block that another request has been given since."""
        event = get_device_module().Event()
        event.record(self._forward_stream)
        return cast(Point, event)

    def build_receiver_registration_message(self) -> list[bytes]:
        """A peer is identified by its requests: nothing has to be registered."""
        return [b"KV_HELLO"]

    def build_receiver_metadata_message(
        self,
        *,
        bootstrap_room: int,
        required_dst_info_num: int,
        decode_prefix_len: int | None,
        is_dummy: bool,
        **_unused: Any,
    ) -> list[bytes]:
        with self._rooms:
            attempt = self._incoming[bootstrap_room].attempt
        peer = DecodePeer(self.local_ip, int(self.rank_port), decode_prefix_len or 0, is_dummy, attempt)
        return DecodeReady(bootstrap_room, required_dst_info_num, peer).frames()

    def _on_prefill_message(self, message: Sequence[bytes]) -> None:
        if message[0] == PAGES:
            stored = msgspec.msgpack.decode(message[1], type=PagesStored)
            assert self._lanes is not None
            self._lanes.add(stored.room, partial(self._load, stored=stored))
        elif not self.handle_abort_ack_message(list(message)) and (
            ended := self.parse_kv_status_message(list(message))
        ):
            room, status, rank, reason = ended
            incoming = self._incoming_request(room, attempt_of_status(message))
            if status != KVPoll.Failed or incoming is None:  # this side learns of success first
                return
            with incoming.lock:
                if incoming.is_open:
                    self.apply_prefill_status(
                        bootstrap_room=room, status=status, prefill_rank=rank, failure_reason=reason
                    )

    def _incoming_request(self, room: int, attempt: bytes) -> IncomingRoom | None:
        """The request of a message; None: it has ended, even if another one reuses its room number."""
        with self._rooms:
            incoming = self._incoming.get(room)
        return incoming if incoming is not None and incoming.attempt == attempt else None

    def _load(self, exchange: Exchange, *, stored: PagesStored) -> None:
        room = stored.room
        incoming = self._incoming_request(room, stored.attempt)
        if incoming is None or self.request_status.get(room) in (None, KVPoll.Failed):
            return  # aborted
        try:
            why = self._fetch(exchange, incoming, stored)
        except Exception as error:  # noqa: BLE001  # SGLang must learn of any error
            _log.exception("pages of a hand-over could not be loaded")
            why = f"{type(error).__name__}: {error}"
        with incoming.lock:  # so that the room is not closed and reused meanwhile
            if not incoming.is_open:
                return
            if why:
                self.record_failure(room, f"kv-sglang could not load the prompt's pages: {why}")
                self.update_status(room, KVPoll.Failed)
            elif stored.metadata:
                self.apply_prefill_status(bootstrap_room=room, status=KVPoll.Success, prefill_rank=stored.rank)

    def _fetch(self, exchange: Exchange, incoming: IncomingRoom, stored: PagesStored) -> str:
        """Load the pages that are in the cache. Empty, or why not all are loaded."""
        hashes = incoming.names.hashes
        if not 0 < stored.pages <= len(hashes) or hashes[stored.pages - 1] != stored.last:
            return (
                "the prefill engine names the prompt's pages differently: it has a different prompt, page size or "
                "adapter"
            )
        incoming.given_by = stored.weights
        incoming.ready.synchronize()
        self._watch.filled()
        while (first := incoming.loaded) < stored.pages:
            count = min(stored.pages - first, self._batch_pages)
            slots = incoming.slots[first - incoming.first :][:count]
            names, lock = incoming.names, incoming.lock
            if why := exchange.get(names, first, slots, lambda: incoming.is_open, lock, given_by=stored.weights):
                return why
            incoming.loaded = first + count
        if stored.metadata:
            # Not before, as each of the prefill engine's stores holds all of the prompt's pages so far.
            exchange.release_pages(incoming.names, incoming.first, given_by=stored.weights)
            return self._take_metadata(incoming, stored.metadata)
        return ""

    def _take_metadata(self, incoming: IncomingRoom, metadata: Sequence[bytes]) -> str:
        args = self.kv_args
        if incoming.loaded != len(incoming.names.hashes):
            return f"{incoming.loaded} of {len(incoming.names.hashes)} pages arrived before the end"
        if [len(part) for part in metadata] != list(args.aux_item_lens):
            return "the prefill engine has other metadata: start both with the same version and options of SGLang"
        with incoming.lock:
            if not incoming.is_open:
                return "the request has ended"
            for address, part in zip(args.aux_data_ptrs, metadata, strict=True):
                ctypes.memmove(address + incoming.aux_index * len(part), part, len(part))
        return ""

    # Both sides.

    def _add(self, rooms: dict[int, Room], number: int, room: Room) -> bool:
        with self._rooms:
            return rooms.setdefault(number, room) is room

    def close_room(self, room: int) -> None:
        """Call this before SGLang frees the request's blocks."""
        with self._rooms:
            outgoing, incoming = self._outgoing.pop(room, None), self._incoming.pop(room, None)
        if outgoing is not None:
            outgoing.close()
        if incoming is not None:
            incoming.close()
            self._release_incoming(room, incoming, is_loaded=self.request_status.get(room) == KVPoll.Success)

    def _release_incoming(self, room: int, incoming: IncomingRoom, *, is_loaded: bool) -> None:
        """End the holds on its pages. A read ends them already, except where other ranks read them too: SGLang clears a
        successful request once all ranks have read."""
        releases_here = self._releases_holds if self._reads_together else not is_loaded
        if releases_here and self._lanes is not None:
            names, given_by = incoming.names, incoming.given_by
            self._lanes.add(room, lambda exchange: exchange.release_pages(names, given_by=given_by))


class _ClosesRoom:
    """For both sides of a request: SGLang frees its blocks right after either of these calls.

    _owns_bootstrap_room: SGLang's own, False for a request that has been refused its number.
    """

    kv_mgr: KVManager
    bootstrap_room: int
    _owns_bootstrap_room: bool

    def fail(self, why: str) -> None:
        """End the request: SGLang aborts it when it polls next."""
        self.kv_mgr.record_failure(self.bootstrap_room, f"kv-sglang cannot hand over: {why}")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def refuse_number(self) -> None:
        """End this request, and nothing of the earlier one that still has the number."""
        self._owns_bootstrap_room = False
        self.conclude_state = KVPoll.Failed
        self.kv_mgr.record_failure(
            self.bootstrap_room, "kv-sglang cannot hand over: an earlier request still has the same number"
        )

    def clear(self) -> None:
        if self._owns_bootstrap_room:
            self.kv_mgr.close_room(self.bootstrap_room)
            super().clear()  # type: ignore[misc]  # SGLang's class, which is next

    def abort(self) -> None:
        if self._owns_bootstrap_room:
            self.kv_mgr.close_room(self.bootstrap_room)
            super().abort()  # type: ignore[misc]


class KVSender(_ClosesRoom, CommonKVSender):  # type: ignore[misc]
    """A request of the prefill engine."""

    def name_pages(self, names: Names) -> None:
        if self._owns_bootstrap_room and not self.kv_mgr.add_outgoing(self.bootstrap_room, names):
            self.refuse_number()


class KVReceiver(_ClosesRoom, CommonKVReceiver):  # type: ignore[misc]
    """A request of the decode engine."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._attempt = secrets.token_bytes(8)
        super().__init__(*arguments, **named)

    def name_pages(self, names: Names) -> None:
        self._names = names

    def init(self, prefill_dp_rank: int) -> None:
        super().init(prefill_dp_rank)
        info = self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        if info is not None and info.attn_tp_size != self.kv_mgr.attn_tp_size:
            local_ranks = self.kv_mgr.attn_tp_size
            self.fail(f"the numbers of ranks differ: {info.attn_tp_size} compute prompts, and {local_ranks} decode")

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **named: Any,
    ) -> None:
        page_size = int(self.kv_mgr.kv_args.page_size)
        first = (decode_prefix_len or 0) // page_size
        slots = [int(block) * page_size for block in kv_indices]
        assert aux_index is not None
        ready = self.kv_mgr.after_forward()
        incoming = IncomingRoom(self._names, first, slots, aux_index, loaded=first, ready=ready, attempt=self._attempt)
        if self.kv_mgr.add_incoming(self.bootstrap_room, incoming):
            super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, **named)
        else:
            self.refuse_number()

    def _send_abort_notification(self, **_unused: Any) -> None:
        """Instead of SGLang's message, which does not tell this request from another with the same number."""
        address = f"{self.kv_mgr.local_ip}:{self.kv_mgr.rank_port}"
        message = DecodeAborted(self.bootstrap_room, address, self._attempt).frames()
        for info in self.bootstrap_infos:
            try:
                socket, lock = self._connect_to_bootstrap_server(info)
                with lock:
                    socket.send_multipart(message)
            except Exception as error:  # noqa: BLE001  # SGLang ends the request here in any case
                _log.debug("the prefill engine could not be notified that a request was aborted: %s", error)
