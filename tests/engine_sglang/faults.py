"""What tests have go wrong, or leave out, inside an engine: called in the process that the engine's are forked from."""

import functools
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
    from kv_connect.identity.identity import origins_of
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
    from kv_sglang import attach, media, storage

    media.media_places = lambda _tokens: []
    storage.check_hashes = attach.check_hashes = lambda: None
