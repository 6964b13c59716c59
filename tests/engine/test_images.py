"""A prompt with an image on the real engine: its content is part of the key, wherever it stands in the prompt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Answer, Engine, started
from models import BY_NAME

TEXT = [3 + (7919 * i) % 1900 for i in range(700)]


def asked(
    engine: Engine, image: int | None, text: list[int], *, uuid: str | None = None, hashed: bool = False
) -> tuple[Answer, int]:
    """The answer about one of the images, which are drawn from their numbers, and how many tokens were found.

    uuid: what the client calls the image. hashed: vLLM hashes that, because the request has an option of processing.
    """
    from PIL import Image
    from vllm import SamplingParams

    prompt: dict[str, Any] = {"prompt_token_ids": text}
    if image is not None:
        pixels = np.random.default_rng(image).integers(0, 255, (56, 56, 3), dtype=np.uint8)
        prompt["multi_modal_data"] = {"image": Image.fromarray(pixels)}
        if uuid is not None:
            prompt["multi_modal_uuids"] = {"image": [uuid]}
        if hashed:
            prompt["mm_processor_kwargs"] = {"do_convert_rgb": True}
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    (output,) = engine.llm.generate([prompt], sampling, use_tqdm=False)
    assert len(output.prompt_token_ids) == len(text) + (32 if image is not None else 0)
    return tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0


@pytest.mark.slow
def test_an_image_is_part_of_the_prefix(tmp_path: Path) -> None:
    """BLIP-2 puts an image's 32 tokens, all of one number, before the text."""
    row = BY_NAME["BLIP-2"]
    model = str(row.write(tmp_path / "model"))
    (tmp_path / "cache").mkdir()
    tier = {"type": "disk", "directory": str(tmp_path / "cache"), "capacity_bytes": "64MiB"}
    cache = {"host": {"capacity_bytes": "64MiB"}, "tiers": [tier], "cold": {"wait_s": 20}}
    questions = [(image, TEXT[:length]) for image in (1, 2, None) for length in (700, 600)]
    with started(model, cache=None, **row.arguments) as plain:
        expected = [asked(plain, *question)[0] for question in questions]
    assert len(set(expected)) == len(expected)
    with started(model, cache=cache, **row.arguments) as engine:
        cold = [asked(engine, *question) for question in questions]
        # 732 tokens with the image before them; the shorter question has its first 512 in common.
        assert cold == list(zip(expected, [0, 512] * 3, strict=True))
        assert [asked(engine, *question) for question in questions] == list(zip(expected, [512] * 6, strict=True))
        engine.inside("kv_corrupt")
        assert [asked(engine, *question)[0] for question in questions] != expected
    with started(model, cache=cache, **row.arguments) as restarted:
        assert [asked(restarted, *question) for question in questions] == list(zip(expected, [512] * 6, strict=True))
        restarted.assert_at_rest()


@pytest.mark.slow
def test_what_a_client_calls_an_image_is_no_name_after_a_restart(tmp_path: Path) -> None:
    """vLLM takes a client's word for which image it is, while the engine lives. The next one is sent another of that
    name, and a disk must not answer with the first, whether or not the name looks like a hash or becomes one."""
    row = BY_NAME["BLIP-2"]
    model = str(row.write(tmp_path / "model"))
    (tmp_path / "cache").mkdir()
    tier = {"type": "disk", "directory": str(tmp_path / "cache"), "capacity_bytes": "64MiB"}
    cache: dict[str, Any] = {"host": {"capacity_bytes": "64MiB"}, "tiers": [tier], "cold": {"wait_s": 20}}
    names = ("image-0", "a" * 64, "b" * 128)
    with started(model, cache=cache, **row.arguments) as engine:
        first, _ = asked(engine, 1, TEXT)
        for name in names:
            assert asked(engine, 1, TEXT, uuid=name) == (first, 0)
            assert asked(engine, 1, TEXT, uuid=name) == (first, 512)
        # vLLM hashes a name together with what the request says about processing.
        assert asked(engine, 1, TEXT, uuid="image-1", hashed=True) == (first, 0)
        assert asked(engine, 1, TEXT, uuid="image-1", hashed=True) == (first, 512)
    with started(model, cache=cache, own_process=True, **row.arguments) as restarted:
        for name in names:
            other, found = asked(restarted, 2, TEXT, uuid=name)
            assert (other != first, found) == (True, 0), name
        assert asked(restarted, 2, TEXT, uuid="image-1", hashed=True)[1] == 0
        assert asked(restarted, 1, TEXT) == (first, 512), "vLLM's own hash"


@pytest.mark.slow
def test_a_clients_hash_counts_where_clients_are_trusted(tmp_path: Path) -> None:
    """And this is the control: another image of that name is answered with the first one's KV."""
    row = BY_NAME["BLIP-2"]
    model = str(row.write(tmp_path / "model"))
    (tmp_path / "cache").mkdir()
    tier = {"type": "disk", "directory": str(tmp_path / "cache"), "capacity_bytes": "64MiB"}
    cache: dict[str, Any] = {"host": {"capacity_bytes": "64MiB"}, "tiers": [tier], "cold": {"wait_s": 20}}
    cache |= {"trust_media_hashes": True}
    with started(model, cache=cache, **row.arguments) as engine:
        first, _ = asked(engine, 1, TEXT, uuid="a" * 64)
        other, _ = asked(engine, 2, TEXT)
        assert asked(engine, 1, TEXT, uuid="image-1", hashed=True) == (first, 0)
    with started(model, cache=cache, **row.arguments) as restarted:
        wrong, found = asked(restarted, 2, TEXT, uuid="a" * 64)
        assert (wrong != other, found) == (True, 512)
        assert asked(restarted, 2, TEXT, uuid="image-1", hashed=True)[1] == 0, "the hash of a name is none of content"
        restarted.assert_at_rest()
