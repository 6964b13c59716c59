"""The committed vectors: what keys are today they must be for ever, everywhere.

The rules are written here a second time, from docs/formats/keys.md alone, so that the page is known to be enough.
"""

import hashlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash
from kv_core import ChainScheme, ChunkKey, Item, KeySequence, KeySpace, tenant_tag

GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text(encoding="utf-8"))
CHAINS: list[dict[str, Any]] = GOLDEN["chains"]
SPACES: list[dict[str, Any]] = GOLDEN["spaces"]


def by_library(vector: dict[str, Any]) -> tuple[str, list[str], str | None]:
    scheme = ChainScheme(vector["algorithm"], vector["chunk_tokens"], bytes.fromhex(vector["secret_hex"]))
    items = []
    for item in vector["items"]:
        content = item["content"] if "content" in item else bytes.fromhex(item["content_hex"])
        items.append(Item(content, item["first_token"], item["tokens"]))
    root = scheme.root(salt=vector["salt"], lora=vector["lora"], tags=vector["tags"])
    sequence = KeySequence(scheme, root=root, items=items)
    sequence.append(vector["tokens"])
    tail = sequence.tail_digest()
    return root.hex(), [digest.hex() for digest in sequence.digests], tail.hex() if tail else None


def sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def by_the_page(vector: dict[str, Any]) -> tuple[str, list[str], str | None]:
    def h(purpose: str, message: bytes) -> bytes:
        if vector["algorithm"] == "sha256":
            return hashlib.sha256(message).digest()
        if vector["algorithm"] == "xxh3_128":
            return xxhash.xxh3_128(message).intdigest().to_bytes(16, "big")
        person = f"kv-core/{purpose}".encode().ljust(16, b"\0")
        return hashlib.blake2b(message, digest_size=32, key=bytes.fromhex(vector["secret_hex"]), person=person).digest()

    def packed(tokens: list[int]) -> bytes:
        if any(token > 0xFFFFFFFF for token in tokens):
            return b"\xff" + b"".join(token.to_bytes(8, "little") for token in tokens)
        return b"".join(token.to_bytes(4, "little") for token in tokens)

    def parent_of(parent: bytes, first: int, last: int) -> bytes:
        here = []
        for item in vector["items"]:
            if item["first_token"] < last and first < item["first_token"] + item["tokens"]:
                text = "content" in item
                content = item["content"].encode() if text else bytes.fromhex(item["content_hex"])
                place = item["first_token"], item["tokens"]
                here.append((*place, (b"s" if text else b"b") + sized(content) + struct.pack("<QQ", *place)))
        if not here:
            return parent
        joined = b"".join(encoded for _, _, encoded in sorted(here))
        return h("items", b"kv-core/items/1" + sized(parent) + struct.pack("<Q", len(here)) + joined)

    root = b""
    if vector["salt"] is not None or vector["lora"] is not None:
        message = b"sglang-cache-namespace-v1"
        for part in (vector["lora"], vector["salt"]):
            message += b"\0" if part is None else b"\1" + sized(part.encode())
        root = h("root", message)
    if vector["tags"]:
        tags = sorted((name.encode(), value.encode()) for name, value in vector["tags"].items())
        message = b"kv-core/tags/1" + sized(root) + struct.pack("<Q", len(tags))
        root = h("tags", message + b"".join(sized(name) + sized(value) for name, value in tags))

    step, tokens = vector["chunk_tokens"], vector["tokens"]
    parent, digests, tail = root, [], None
    for first in range(0, len(tokens), step):
        chunk = tokens[first : first + step]
        parent = parent_of(parent, first, first + len(chunk))
        if len(chunk) == step:
            parent = h("chunk", parent + packed(chunk))
            digests.append(parent.hex())
        else:
            tail = h("tail", b"kv-core/tail1" + bytes([len(parent)]) + parent + packed(chunk)).hex()
    return root.hex(), digests, tail


@pytest.mark.parametrize("vector", CHAINS, ids=[vector["name"] for vector in CHAINS])
def test_chains_are_what_they_have_always_been(vector: dict[str, Any]) -> None:
    wanted = vector["root"], vector["digests"], vector["tail"]
    assert by_library(vector) == wanted
    assert by_the_page(vector) == wanted


@pytest.mark.parametrize("vector", SPACES, ids=[vector["model"] for vector in SPACES])
def test_keys_and_spellings_are_what_they_have_always_been(vector: dict[str, Any]) -> None:
    texts = [vector[name] for name in ("model", "revision", "dtype", "format")]
    space = KeySpace(*texts, vector["world"], vector["chain"], tuple(vector["tags"].items()))
    key = ChunkKey.from_hex(vector["key"])
    assert space.fingerprint.hex() == vector["fingerprint"]
    tenant = tenant_tag(vector["salt"])
    assert (tenant.hex(), key.tenant) == (vector["tenant"], tenant)
    whole = space.key(bytes.fromhex(vector["digest"]), vector["group"], vector["shard"], tenant=tenant)
    assert key == (whole if vector["layer"] is None else whole.split_layers(vector["layer"] + 1)[-1])
    assert (key.path(), space.spell(key)) == (vector["path"], vector["spelling"])
    assert ChunkKey.from_path(vector["path"]) == key
    assert KeySpace.parse(vector["spelling"]) == (space, key)

    message = b"kv-core/space/1" + struct.pack("<QQ", vector["world"], len(vector["tags"]))
    for text in [*texts, vector["chain"], *(text for tag in sorted(vector["tags"].items()) for text in tag)]:
        message += sized(text.encode())
    fingerprint = hashlib.sha256(message).digest()[:16]
    layer = 0xFFFF if vector["layer"] is None else vector["layer"]
    shares = struct.pack(">HHH", vector["group"], vector["shard"], layer)
    salt = vector["salt"]
    tag = bytes(7) if salt is None else hashlib.sha256(b"kv-core/tenant/1" + sized(salt.encode())).digest()[:7]
    assert b"\1" + fingerprint + tag + shares + bytes.fromhex(vector["digest"]) == key


def test_the_example_on_the_page_is_right() -> None:
    page = Path(__file__).parents[3] / "docs" / "formats" / "keys.md"
    if not page.exists():
        pytest.skip("the package was taken out of its repository, and the page is not in it")
    example = page.read_text(encoding="utf-8").rpartition("## Example")[2]
    shown = re.findall(r"^(message|digest|tail) +([0-9a-f]+)$", example, re.MULTILINE)
    sequence = KeySequence(ChainScheme(chunk_tokens=4))
    sequence.append(range(1, 11))
    tail = sequence.tail_digest()
    assert tail is not None
    assert [value for name, value in shown if name != "message"] == [
        *(digest.hex() for digest in sequence.digests),
        tail.hex(),
    ]
    for (_, message), (_, digest) in zip(shown[::2], shown[1::2], strict=True):
        assert hashlib.sha256(bytes.fromhex(message)).hexdigest() == digest


def test_keys_do_not_depend_on_the_interpreter_s_hash_seed() -> None:
    """A peer's did, and two of its processes never hit on each other's chunks."""
    program = (
        "from kv_core import *; s = ChainScheme(chunk_tokens=2); "
        "q = KeySequence(s, root=s.root(tags={'b': '1', 'a': '2'}), items=[Item('x', 1, 2), Item(b'y', 1, 1)]); "
        "space = KeySpace('m', 'r', 'd', 'f', 2, s.name, (('b', '1'), ('a', '2'))); "
        "print([k.hex() for k in space.keys(q.append(range(6)), groups=2, tenant=tenant_tag('t'))])"
    )
    printed = set()
    for seed in ("0", "1", "12345"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        printed.add(run.stdout)
    assert len(printed) == 1
    assert printed.pop().strip()
