"""What tests have go wrong, or leave out, inside an engine: called in the process that the engine's are forked from."""

import functools
import os
import shutil
from typing import Any


def overwrite_loaded_weights(new: str, loaded: str) -> None:
    """Right after the engine has loaded its weights, their file gets what is in another, in place."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    load_model = ModelRunner.load_model

    @functools.wraps(load_model)
    def load_then_overwrite(self: Any, *args: Any, **named: Any) -> Any:
        done = load_model(self, *args, **named)
        shutil.copyfile(new, loaded)
        return done

    ModelRunner.load_model = load_then_overwrite


def name_weights_by_the_files_of_now() -> None:
    """Our rule left out that the files must be as they were before the engine loaded them."""
    from kv_connect.identity import origins_of
    from kv_sglang import attach
    from kv_sglang.served import sources

    attach.before_loading = lambda: origins_of(sources())


def give_all_media_the_same_numbers() -> None:
    """A collision: what SGLang puts in the place of a picture's tokens is the same for all pictures. What it keeps by
    their hashes, such as their embeddings, stays apart."""
    from sglang.srt.managers import schedule_batch

    compute = schedule_batch._compute_pad_values
    schedule_batch._compute_pad_values = lambda identity: compute(bytes(len(identity)))


def name_media_by_their_numbers() -> None:
    """Our rule left out that pages with media stay out of the cache."""
    from kv_sglang import attach, names, storage

    names.media_places = lambda _tokens: []
    storage.check_hashes = attach.check_hashes = lambda: None


def keep_what_is_placed(directory: str) -> None:
    """The pages that are given to blended prompts, and the first token of each, by the source's distance."""
    import torch
    from kv_blend.sglang.storage import SegmentPages

    place, write = SegmentPages._place, SegmentPages._write
    now: list[Any] = []

    def kept_place(self: Any, source: Any, firsts: Any, slots: Any) -> bool:
        now[:] = [source.distance, list(firsts)]
        return place(self, source, firsts, slots)

    def kept_write(self: Any, pages: Any, slots: Any) -> None:
        torch.save((*now, pages), f"{directory}/{now[0]}-{now[1][0]}.pt")
        write(self, pages, slots)

    SegmentPages._place, SegmentPages._write = kept_place, kept_write  # type: ignore[method-assign]


def give_both_one_name() -> None:
    """Our rule left out that a plan needs a salt of its own."""
    import msgspec
    from kv_blend.plan import KEY, BlendPlan
    from kv_blend.sglang import phases, storage

    def without_salt(params: Any, salt: Any, tokens: Any) -> Any:
        del salt, tokens
        return (msgspec.convert(params[KEY], BlendPlan), "") if params and KEY in params else None

    storage.read_plan = phases.read_plan = without_salt
    storage.is_marked = lambda _salt: True


def lose_segments(every: int) -> None:
    """Each so many-th run of pages that is to be placed is not: it has left the cache since it was promised."""
    from kv_blend.sglang.storage import SegmentPages

    place, calls = SegmentPages._place, iter(range(1, 1 << 30))

    def lost(self: Any, source: Any, firsts: Any, slots: Any) -> bool:
        return next(calls) % every != 0 and place(self, source, firsts, slots)

    SegmentPages._place = lost  # type: ignore[method-assign]


def lose_segments_on_the_second_rank(switch: str) -> None:
    """While this file is there."""
    import torch
    from kv_blend.sglang.storage import SegmentPages

    place = SegmentPages._place

    def lost(self: Any, source: Any, firsts: Any, slots: Any) -> bool:
        is_lost = torch.distributed.get_rank() == 1 and os.path.exists(switch)
        return not is_lost and place(self, source, firsts, slots)

    SegmentPages._place = lost  # type: ignore[method-assign]


def fail_to_place() -> None:
    """A bug of ours in the middle of a load."""
    from kv_blend.sglang.storage import SegmentPages

    def fails(*_arguments: Any) -> Any:
        raise RuntimeError("a bug of ours")

    SegmentPages._write = fails  # type: ignore[method-assign]


def rotate_otherwise() -> None:
    """The frequencies that are read are not the model's."""
    import torch
    from kv_blend import rotations

    rotations._frequencies = lambda _rotary: 5000.0 ** -(torch.arange(16) / 16)


def retract_now_and_then() -> None:
    """As where the KV space is full: SGLang's own switch for its tests."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 3
    retract = ScheduleBatch.retract_decode

    def told(self: Any, *given: Any, **named: Any) -> Any:
        several, done = len(self.reqs) > 1, retract(self, *given, **named)
        if several:
            print(f"of several requests, {len(done[0])} was retracted", flush=True)
        return done

    ScheduleBatch.retract_decode = told  # type: ignore[method-assign]
