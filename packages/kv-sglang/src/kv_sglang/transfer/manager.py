"""SGLang's transfer backend `kv`: its bootstrap, heartbeat and states are SGLang's own, the pages go through the cache.

SGLang creates one manager per rank, and a sender or receiver per request. The engines exchange only short messages,
over the sockets that SGLang's managers have for them: the decode engine reports its address, the prefill engine how
many pages of the prompt are in the cache and, with the last of them, SGLang's metadata, which contain the first token.
Each side names the prompt's pages itself, from its own request, so no message can cause other pages to be loaded.
"""

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

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
from kv_sglang.linker.device import DevicePool, describe_device
from kv_sglang.linker.lanes import Point
from kv_sglang.names import Names, why_names_do_not_suffice
from kv_sglang.page_settings import read_settings
from kv_sglang.served import served_model
from kv_sglang.transfer.exchange import Exchange
from kv_sglang.transfer.rooms import Coming, Lanes, Leaving
from kv_sglang.weights import engine_name, watch_updates

_log = limited_logger(__name__)

_STATUS: Final = b"KV_STATUS"
_HERE: Final = b"KV_HERE"
_PAGES: Final = b"KV_PAGES"
_BATCH_BYTES: Final = 16 << 20
"""Bytes stored before the other side is notified, and bytes copied while a room cannot be closed."""


@dataclass(frozen=True, slots=True)
class _Peer:
    """A rank of a decode engine that waits for a request. The names are those that SGLang's classes look for.

    prefix_tokens: those that it has already.
    """

    endpoint: str
    dst_port: int
    prefix_tokens: int
    is_dummy: bool


@dataclass(frozen=True, slots=True)
class _Said:
    """What a prefill engine says of a prompt.

    pages: how many of its pages are in the cache.
    last: the name of the last of them.
    weights: the revision of the weights with which they were computed.
    metadata: SGLang's, with the last page.
    """

    pages: int
    last: str
    weights: str
    metadata: Sequence[bytes]


class KVManager(CommonKVManager):  # type: ignore[misc]  # the engine's classes are untyped here
    """The manager of one rank."""

    kv_status_msg_tag = _STATUS
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        """
        Raises:
            ConfigError: pages of this model, or with this parallelism, cannot be handed over.
        """
        _refuse_what_is_not_served(args, server_args)
        check_hashes()
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self._leaving: dict[int, Leaving] = {}
        self._coming: dict[int, Coming] = {}
        self._rooms = threading.Lock()
        self._lanes: Lanes | None = None
        self._batch_pages = 1

    # Before it serves.

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
        attached = attach(
            settings, served_model(rank), rank, {KV: described.pages}, engine_name=engine_name(rank.ranks)
        )
        assert attached.watch is not None
        attached.watch.see_emptied(allocator)
        self._attached, self._watch = attached, attached.watch
        self._forward_stream = forward_stream
        self._batch_pages = max(1, _BATCH_BYTES // described.pages.format.nbytes)
        self._lanes = Lanes(partial(self._exchange, described, settings.handover))
        is_prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        threading.Thread(
            target=self._listen, args=(self._hear_decode if is_prefill else self._hear_prefill,), daemon=True
        ).start()
        if not is_prefill:
            self._start_heartbeat_checker_thread()
        _log.info("kv-sglang hands over pages of %d tokens", settings.chunk_tokens)

    def _exchange(self, described: DevicePool, handover: HandoverConfig) -> Exchange:
        store, in_doubt = self._attached.stores[KV], self._watch.holds_old_pages
        return Exchange(store, described.copier(), in_doubt, wait_s=handover.wait_s, hold_s=handover.hold_s)

    def _listen(self, hear: Any) -> None:
        while True:
            message = self.server_socket.recv_multipart()
            try:
                hear(message)
            except Exception:  # noqa: BLE001  # any process that reaches the port may send anything
                _log.exception("a message about a hand-over was not understood")

    # The prefill engine's side.

    def name_leaving(self, room: int, names: Names) -> None:
        with self._rooms:
            self._leaving[room] = Leaving(room, names)

    def _hear_decode(self, message: Sequence[bytes]) -> None:
        if message[0] == ABORT_TAG:
            notification = AbortNotification.from_zmq(list(message))
            if notification is not None and self.request_status.get(notification.room) not in (None, KVPoll.Success):
                self.record_failure(notification.room, "the decode engine has given up the request")
                self.update_status(notification.room, KVPoll.Failed)
            return
        if message[0] != _HERE:
            return
        _, room_text, endpoint, port, prefix, required, dummy = message
        room = int(room_text)
        if self.request_status.get(room) not in (None, KVPoll.Bootstrapping):
            return  # late, from a request that had the same number
        peers = self.transfer_infos.setdefault(room, {})
        address = endpoint.decode("ascii"), int(port)
        peers[f"{address}"] = _Peer(*address, int(prefix), dummy == b"1")
        if len(peers) >= int(required):
            self.req_to_decode_prefix_len[room] = max(peer.prefix_tokens for peer in peers.values())
            self.update_status(room, KVPoll.WaitingForInput)

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
            leaving = self._leaving.get(bootstrap_room)
        if leaving is None:
            return  # it was given up
        job = partial(
            self._send,
            leaving=leaving,  # not by its number, which may be another request's by the time that these are stored
            start=int(index_slice.start),
            slots=[int(block) * page_size for block in kv_indices],
            aux_index=aux_index if is_last_chunk else None,
            event=wait_event,
        )
        assert self._lanes is not None
        self._lanes.add(bootstrap_room, job)

    def _send(
        self, exchange: Exchange, leaving: Leaving, *, start: int, slots: list[int], aux_index: int | None, event: Any
    ) -> None:
        peers = list(self.transfer_infos.get(leaving.room, {}).values())
        if not peers or self.request_status.get(leaving.room) in (None, KVPoll.Failed):
            return  # it was given up
        try:
            if event is not None:
                event.synchronize()
            why = self._store(exchange, leaving, peers, start=start, slots=slots, aux_index=aux_index)
        except Exception as error:  # noqa: BLE001  # SGLang must be told of any error
            _log.exception("pages of a hand-over could not be stored")
            why = f"{type(error).__name__}: {error}"
        if why or aux_index is not None:
            self._conclude(leaving, peers, why)

    def _conclude(self, leaving: Leaving, peers: Sequence[_Peer], why: str) -> None:
        """Tell SGLang how it ended. why: it failed; empty: all pages are stored."""
        room, reason = leaving.room, f"kv-sglang could not hand over: {why}"
        with leaving.lock:
            # Once it is closed, its number may be another request's. One that has failed already only fails again.
            if not leaving.is_open and self.request_status.get(room) != KVPoll.Failed:
                return
            if not why:
                self.update_status(room, KVPoll.Success)
                return
            if self.conclude_failure(bootstrap_room=room, failure_reason=reason, targets=[]) is None:
                return  # it was closed, and is cleared by now
            with self.failure_lock:
                reason = self.failure_records.get(room, reason)  # if it had failed before, the first
        # Without the lock, which SGLang's scheduler may want: a peer that is gone may be waited for.
        targets = [(peer.endpoint, peer.dst_port) for peer in peers if not peer.is_dummy]
        self.send_kv_status_message(targets=targets, bootstrap_room=room, status=KVPoll.Failed, failure_reason=reason)

    def _store(
        self,
        exchange: Exchange,
        leaving: Leaving,
        peers: Sequence[_Peer],
        *,
        start: int,
        slots: list[int],
        aux_index: int | None,
    ) -> str:
        """Store pages and notify the peers. Empty, or why not all pages are stored."""
        names = leaving.names
        first = start + max(peer.prefix_tokens for peer in peers) // int(self.kv_args.page_size)
        targets = [peer for peer in peers if not peer.is_dummy]
        for at in range(0, len(slots), self._batch_pages):
            part = slots[at : at + self._batch_pages]
            if why := exchange.put(names, first + at, part, lambda: leaving.is_open):
                return why
            if leaving.is_open:
                self._tell(targets, leaving, first + at + len(part), [])
        if aux_index is not None:
            done = first + len(slots)
            if done != len(names.hashes):
                return f"{done} pages were computed, and the prompt has {len(names.hashes)}"
            with leaving.lock:
                if not leaving.is_open:  # then their place may be another request's
                    return "the request has ended"
                metadata = self._metadata(aux_index)
            self._tell(targets, leaving, done, metadata)
        return ""

    def _tell(self, peers: Sequence[_Peer], leaving: Leaving, pages: int, metadata: Sequence[bytes]) -> None:
        """Notify the peers that pages up to this number are in the cache."""
        room, last = leaving.room, leaving.names.hashes[pages - 1].encode("ascii")
        weights = self._attached.stores[KV].revision.encode()
        parts = [_PAGES, b"%d" % room, b"%d" % self._prefill_unique_rank(), b"%d" % pages, last, weights, *metadata]
        for peer in peers:
            address = NetworkAddress(peer.endpoint, peer.dst_port)
            self._send_multipart_locked(address.to_tcp(), parts, is_ipv6=address.is_ipv6)

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

    def name_coming(self, room: int, coming: Coming) -> None:
        with self._rooms:
            self._coming[room] = coming

    def after_forward(self) -> Point:
        """The point at which the forward pass in flight is over. It may still write the last token of a request that
        has ended, to a block that another request has been given since."""
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
        return [
            _HERE,
            b"%d" % bootstrap_room,
            self.local_ip.encode("ascii"),
            b"%d" % self.rank_port,
            b"%d" % (decode_prefix_len or 0),
            b"%d" % required_dst_info_num,
            b"1" if is_dummy else b"0",
        ]

    def _hear_prefill(self, message: Sequence[bytes]) -> None:
        if message[0] == _PAGES:
            _, room, rank, pages, last, weights, *metadata = message
            said = _Said(int(pages), last.decode("ascii"), weights.decode(), metadata)
            assert self._lanes is not None
            self._lanes.add(int(room), partial(self._load, room=int(room), rank=int(rank), said=said))
        elif not self.handle_abort_ack_message(list(message)) and (
            ended := self.parse_kv_status_message(list(message))
        ):
            room_number, status, prefill_rank, reason = ended
            if status == KVPoll.Failed:  # success is known here first
                self.apply_prefill_status(
                    bootstrap_room=room_number, status=status, prefill_rank=prefill_rank, failure_reason=reason
                )

    def _load(self, exchange: Exchange, *, room: int, rank: int, said: _Said) -> None:
        with self._rooms:
            coming = self._coming.get(room)
        if coming is None or self.request_status.get(room) in (None, KVPoll.Failed):
            return  # it was given up
        try:
            why = self._fetch(exchange, coming, said)
        except Exception as error:  # noqa: BLE001  # SGLang must be told of any error
            _log.exception("pages of a hand-over could not be loaded")
            why = f"{type(error).__name__}: {error}"
        with coming.lock:  # so that it is not closed, and its number given to another request, meanwhile
            if not coming.is_open:
                return
            if why:
                self.record_failure(room, f"kv-sglang could not take over: {why}")
                self.update_status(room, KVPoll.Failed)
            elif said.metadata:
                self.apply_prefill_status(bootstrap_room=room, status=KVPoll.Success, prefill_rank=rank)

    def _fetch(self, exchange: Exchange, coming: Coming, said: _Said) -> str:
        """Load the pages that are in the cache. Empty, or why not all are loaded."""
        hashes = coming.names.hashes
        if not 0 < said.pages <= len(hashes) or hashes[said.pages - 1] != said.last:
            return (
                "the prefill engine names the prompt's pages differently: it has a different prompt, page size or "
                "adapter"
            )
        coming.ready.synchronize()
        self._watch.filled()
        while (first := coming.loaded) < said.pages:
            count = min(said.pages - first, self._batch_pages)
            slots = coming.slots[first - coming.first :][:count]
            names, lock = coming.names, coming.lock
            if why := exchange.get(names, first, slots, lambda: coming.is_open, lock, given_by=said.weights):
                return why
            coming.loaded = first + count
        if said.metadata:
            # Not before, as each of the prefill engine's stores holds all of the prompt's pages so far.
            exchange.need_not(hashes[: coming.first], given_by=said.weights)
            return self._take_metadata(coming, said.metadata)
        return ""

    def _take_metadata(self, coming: Coming, metadata: Sequence[bytes]) -> str:
        args = self.kv_args
        if coming.loaded != len(coming.names.hashes):
            return f"{coming.loaded} of {len(coming.names.hashes)} pages arrived before the end"
        if [len(part) for part in metadata] != list(args.aux_item_lens):
            return "the prefill engine has other metadata: start both with the same version and options of SGLang"
        with coming.lock:
            if not coming.is_open:
                return "the request has ended"
            for address, part in zip(args.aux_data_ptrs, metadata, strict=True):
                ctypes.memmove(address + coming.aux_index * len(part), part, len(part))
        return ""

    # Both.

    def close_room(self, room: int) -> None:
        """Call this before SGLang frees the request's blocks."""
        with self._rooms:
            open_here = self._leaving.pop(room, None), self._coming.pop(room, None)
        for each in open_here:
            if each is not None:
                each.close()


class _ClosesRoom:
    """For both sides of a request: SGLang frees its blocks right after either of these calls."""

    kv_mgr: KVManager
    bootstrap_room: int

    def fail(self, why: str) -> None:
        """End the request: SGLang aborts it when it polls next."""
        self.kv_mgr.record_failure(self.bootstrap_room, f"kv-sglang cannot hand over: {why}")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def clear(self) -> None:
        self.kv_mgr.close_room(self.bootstrap_room)
        super().clear()  # type: ignore[misc]  # SGLang's class, which is next

    def abort(self) -> None:
        self.kv_mgr.close_room(self.bootstrap_room)
        super().abort()  # type: ignore[misc]


class KVSender(_ClosesRoom, CommonKVSender):  # type: ignore[misc]
    """A request of the prefill engine."""

    def name_pages(self, names: Names) -> None:
        self.kv_mgr.name_leaving(self.bootstrap_room, names)


class KVReceiver(_ClosesRoom, CommonKVReceiver):  # type: ignore[misc]
    """A request of the decode engine."""

    def name_pages(self, names: Names) -> None:
        self._names = names

    def init(self, prefill_dp_rank: int) -> None:
        super().init(prefill_dp_rank)
        info = self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        if info is not None and info.attn_tp_size != self.kv_mgr.attn_tp_size:
            own = self.kv_mgr.attn_tp_size
            self.fail(f"the numbers of ranks differ: {info.attn_tp_size} compute prompts, and {own} decode")

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
        coming = Coming(self._names, first, slots, aux_index, loaded=first, ready=ready)
        self.kv_mgr.name_coming(self.bootstrap_room, coming)
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, **named)


def _refuse_what_is_not_served(args: Any, server_args: Any) -> None:
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
