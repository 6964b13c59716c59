"""Blending asked for over HTTP, in text: SGLang's own server, started as users start it, and one ordinary request."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from engines import PAGE
from test_http import ON_A_CPU, Server

MARK = "w999"
DOCUMENTS = [" ".join(f"w{300 + (17 * number + 79) * at % 690}" for at in range(300)) for number in range(3)]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def prompt(*order: int) -> str:
    parts = ["w5 w6 w7", *(DOCUMENTS[at] for at in order), "w9 w10 w11"]
    return f" {MARK} ".join(parts)


class Blending(Server):
    __test__ = False

    @classmethod
    def _get_spec_server_args(cls) -> list[str]:
        return [*cls.flags, *(flag for flag in ON_A_CPU if flag != "--skip-tokenizer-init")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from kv_testing.tiny import TinyLlama, write_spelling  # type: ignore[attr-defined]

    directory = tmp_path_factory.mktemp("blend")
    Blending.model = str(write_spelling(directory))
    (directory / "template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "kv_blend.sglang", "flags", "--capacity", "64MiB", "--page-size", str(PAGE)]
    flags = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    Blending.flags = [*shlex.split(flags), "--chat-template", str(directory / "template.jinja")]
    Blending._launch_spec_server()
    yield Blending.base_url
    Blending._stop_spec_server()
