"""`kv keys` says the same as the library, and answers what is wrong in one line with status 2."""

import importlib.metadata
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core import ChainScheme, InputError, Item, KeySequence, KeySpace, tenant_tag
from kv_core.tools import cli
from kv_core.tools.cli import main, read_tokens
from kv_testing.strategies import SECRET, prompts

relaxed = settings(deadline=None, max_examples=80)


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(list(range(10))))
    return path


def test_json_says_what_the_library_says(prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")
    secret.chmod(0o600)
    words = ["keys", str(prompt), "--chunk-tokens", "4", "--algorithm", "blake2b", "--secret-file", str(secret)]
    words += ["--salt", "s", "--lora", "l", "--tag", "a=1", "--tag", "b=x=y", "--item", "9f:2c:5:2", "--partial"]
    words += ["--model", "org/m", "--revision", "r", "--dtype", "bfloat16", "--format-fingerprint", "ff"]
    assert main([*words, "--world", "2", "--group", "3", "--output", "json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    scheme = ChainScheme("blake2b", 4, SECRET)
    root = scheme.root(salt="s", lora="l", tags={"a": "1", "b": "x=y"})
    sequence = KeySequence(scheme, root=root, items=[Item("9f:2c", 5, 2)])
    sequence.append(range(10))
    tail = sequence.tail_digest()
    assert tail is not None
    assert [row["digest"] for row in rows] == [digest.hex() for digest in [*sequence.digests, tail]]
    assert [(row["chunk"], row["first_token"], row["tokens"]) for row in rows] == [(0, 0, 4), (1, 4, 4), (2, 8, 2)]
    space = KeySpace("org/m", "r", "bfloat16", "ff", 2, scheme.name)
    keys = space.keys(sequence.digests, groups=[3], tenant=tenant_tag("s"))
    named = [named for row in rows[:2] for named in row["keys"]]
    assert [(name["group"], name["shard"]) for name in named] == [(3, 0), (3, 1)] * 2
    assert [name["key"] for name in named] == [key.hex() for key in keys]
    assert [name["path"] for name in named] == [key.path() for key in keys]
    assert [KeySpace.parse(name["spelling"]) for name in named] == [(space, key) for key in keys]


def test_a_key_space_of_which_only_the_fingerprint_is_known_has_the_same_keys(
    prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine's key space has tags for its configuration, which nobody could write on a command line."""
    scheme = ChainScheme(chunk_tokens=4)
    space = KeySpace("org/m", "r", "bfloat16", "ff", 2, scheme.name, (("config", "5d41402a"), ("engine", "vllm")))
    words = ["keys", str(prompt), "--chunk-tokens", "4", "--salt", "s", "--space", space.fingerprint.hex()]
    assert main([*words, "--world", "2", "--group", "3", "--output", "json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    digests = KeySequence(scheme, root=scheme.root(salt="s")).append(range(8))
    keys = space.keys(digests, groups=[3], tenant=tenant_tag("s"))
    named = [named for row in rows for named in row["keys"]]
    assert [name["key"] for name in named] == [key.hex() for key in keys]
    assert [name["path"] for name in named] == [key.path() for key in keys]
    assert all(name.keys() == {"group", "shard", "key", "path"} for name in named)


def test_the_table_has_a_row_a_key_and_says_what_is_left_over(prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(prompt), "--chunk-tokens", "4", "--model", "m", "--world", "2"]) == 0
    head, *rows, left = capsys.readouterr().out.splitlines()
    assert head.split() == ["chunk", "tokens", "key"]
    assert [row.split()[:2] for row in rows] == [["0", "0-3"], ["0", "0-3"], ["1", "4-7"], ["1", "4-7"]]
    assert left.startswith("2 tokens after the last whole chunk of 4 have no key")
    assert main(["keys", str(prompt), "--chunk-tokens", "5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    "text", ["0 1 2 3 4 5 6 7 8 9", "0,1,2,3,4,5,6,7,8,9\n", " 0, 1 ,2\n3\t4 5 , 6 7 8 9 ", "[0,1,2,3,4,\n5,6,7,8,9]"]
)
def test_all_ways_to_write_tokens_mean_the_same(
    text: str, prompt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(prompt), "--chunk-tokens", "4"]) == 0
    wanted = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["keys", "-", "--chunk-tokens", "4"]) == 0
    assert capsys.readouterr().out == wanted


@given(
    tokens=prompts(),
    part_chars=st.integers(1, 30),
    gaps=st.lists(st.sampled_from([" ", ",", " ,\n", "\n\n"]), min_size=24, max_size=24),
)
@relaxed
def test_tokens_are_read_the_same_however_the_stream_is_cut(
    tokens: list[int], part_chars: int, gaps: list[str]
) -> None:
    text = "".join(f"{gap}{token}" for gap, token in zip(["", *gaps], tokens, strict=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_READ_CHARS", part_chars)
        assert [token for part in read_tokens(io.StringIO(text)) for token in part] == tokens
        assert [token for part in read_tokens(io.StringIO(json.dumps(tokens))) for token in part] == tokens


def test_a_long_input_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_READ_CHARS", 100)
    parts = list(read_tokens(io.StringIO(" ".join(map(str, range(1000))))))
    assert max(map(len, parts)) < 100
    assert [token for part in parts for token in part] == list(range(1000))


BAD_TOKENS = [
    ("1 2 x", "token 2 is 'x'"),
    ("1 -2", "token 1 is '-2'"),
    ("1 2.0", "token 1 is '2.0'"),
    ("1 1_000", "token 1 is '1_000'"),
    ("1 +2", "token 1 is"),
    ("1 \u0661", "token 1 is"),
    ("1,,2", "token 1 is missing: there is one comma too many"),
    ("1,2,", "token 2 is missing"),
    (",1", "token 0 is missing"),
    ("1 0x10", "token 1 is '0x10'"),
    ("1 18446744073709551616", "token 1 is 18446744073709551616, which is too large"),
    ("1 " + "9" * 5000, "token 1 is '9999"),
    ("[1, 2", "begins like a JSON list but is not one"),
    ("[1, 2] 3", "begins like a JSON list but is not one"),
    ("[" * 100_000, "begins like a JSON list but is not one"),
    ("[1, [2]]", r"token 1 is \[2\], a list"),
    ("[1, 2.0]", "token 1 is 2.0, a float"),
    ("[1, true, 3]", "true or false"),
    ('[1, "2"]', "token 1 is '2', a str"),
    ("[1, null]", "a NoneType"),
    ("[1, -1]", "token 1 is -1, which is negative"),
    ('{"tokens": [1]}', "token 0 is"),
]


@pytest.mark.parametrize(("text", "complaint"), BAD_TOKENS, ids=[complaint for _, complaint in BAD_TOKENS])
def test_bad_tokens_are_named(text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens"
    path.write_text(text, encoding="utf-8")
    assert main(["keys", str(path)]) == 2
    said = capsys.readouterr().err
    with pytest.raises(InputError, match=complaint):
        raise InputError(said)
    assert said.startswith("kv: error: ")
    assert said.count("\n") == 1
    assert len(said) < 400


BAD_OPTIONS: list[tuple[list[str], str]] = [
    ([], "give either FILE with token ids"),
    (["P", "--text", "P"], "give either FILE with token ids"),
    (["P", "--tokenizer", "P"], "go with --text"),
    (["--text", "P"], "--text needs --tokenizer"),
    (["--text", "P", "--tokenizer", "P"], "is not a tokenizer.json"),
    (["nowhere.json"], "nowhere.json: No such file"),
    (["P", "--chunk-tokens", "0"], "chunk_tokens is 0"),
    (["P", "--chunk-tokens", "x"], "invalid int value"),
    (["P", "--algorithm", "md5"], "invalid choice"),
    (["P", "--algorithm", "blake2b"], "needs a secret of 16 to 64 bytes"),
    (["P", "--secret-file", "P"], "sha256 takes no secret"),
    (["P", "--tag", "a"], "write it as NAME=VALUE"),
    (["P", "--tag", "a=1", "--tag", "a=2"], "given twice"),
    (["P", "--item", "a:b"], "write it as HASH:FIRST:TOKENS"),
    (["P", "--item", "a:0:0"], "fills 0 tokens"),
    (["P", "--dtype", "bfloat16"], "need --model or --space"),
    (["P", "--space", "a" * 32, "--model", "m"], "--space stands for --model"),
    (["P", "--space", "a" * 32, "--dtype", "bfloat16"], "leave them out"),
    (["P", "--space", "A" * 32], "write 32 lower-case hex digits"),
    (["P", "--space", "a" * 32, "--world", "0"], "--world 0: write the number of shards"),
    (["P", "--space", "a" * 32, "--group", "65535"], "group 65535"),
    (["P", "--model", ""], "needs the model's name"),
    (["P", "--model", "m", "--world", "0"], "world is 0"),
    (["P", "--model", "m", "--group", "65535"], "group 65535"),
    (["P", "--nonsense"], "unrecognized arguments"),
]


@pytest.mark.parametrize(("words", "complaint"), BAD_OPTIONS, ids=[" ".join(words) for words, _ in BAD_OPTIONS])
def test_bad_options_are_answered_with_what_to_do(
    words: list[str], complaint: str, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", *(str(prompt) if word == "P" else word for word in words)]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert "Traceback" not in said.err


def test_input_that_is_no_text_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens.npy"
    path.write_bytes(b"\x93NUMPY\1\0")
    assert main(["keys", str(path)]) == 2
    assert "not UTF-8 text" in capsys.readouterr().err
    assert main(["keys", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_a_text_is_tokenized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="an extra of kv-core")
    words = {word: number for number, word in enumerate(["?", "a", "b", "c", "d"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("a b c d b", encoding="utf-8")
    asked = ["keys", "--text", str(tmp_path / "text"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main([*asked, "--chunk-tokens", "4", "--output", "json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["digest"]
        == KeySequence(ChainScheme(chunk_tokens=4)).append([1, 2, 3, 4])[0].hex()
    )


def test_a_missing_tokenizers_package_is_named(
    prompt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["keys", "--text", str(prompt), "--tokenizer", str(prompt)]) == 2
    assert "pip install 'kv-core[tokenizer]'" in capsys.readouterr().err


class Entry:
    """An entry point of another package."""

    def __init__(self, name: str, loaded: Any) -> None:
        self.name, self.value, self._loaded = name, f"{name}:register", loaded

    def load(self) -> Any:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


def test_other_packages_add_commands_and_cannot_break_ours(
    prompt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def register(commands: Any) -> None:
        commands.add_parser("greet", help="say hello").set_defaults(run=lambda asked: print("hello") or 7)

    entries = [Entry("greet", register), Entry("broken", ImportError("no such thing"))]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: entries if group == cli.COMMANDS else [])
    assert main(["greet"]) == 7
    said = capsys.readouterr()
    assert said.out == "hello\n"
    assert "the command 'broken' of broken:register cannot be used: no such thing" in said.err
    assert main(["--help"]) == 0
    assert "greet" in capsys.readouterr().out
    assert main(["keys", str(prompt)]) == 0
    assert capsys.readouterr().err == ""


def test_help_is_complete_and_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--help"]) == 0
    shown = capsys.readouterr().out
    options = (
        "chunk-tokens algorithm secret-file salt lora tag item model revision dtype format-fingerprint world group"
    )
    for option in [*(f"--{name}" for name in options.split()), "--space", "--partial", "--output", "examples:"]:
        assert option in shown
    assert main([]) == 2


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    """`kv keys … | head` must not end in a traceback, nor in a message as the interpreter goes."""
    (tmp_path / "tokens").write_text("1 " * 50_000)
    program = (
        "import sys; from kv_core.tools.cli import main; sys.exit(main(['keys', 'tokens', '--chunk-tokens', '1']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait(timeout=60) == 0


def test_an_output_without_room_is_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("1 " * 50_000)
    program = (
        "import sys; from kv_core.tools.cli import main; sys.exit(main(['keys', 'tokens', '--chunk-tokens', '1']))"
    )
    with Path("/dev/full").open("wb") as full:
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert run.stderr == b"kv: error: the output cannot be written: No space left on device\n"
    assert run.returncode == 2


def test_streams_that_are_closed_are_no_traceback(tmp_path: Path) -> None:
    """By a shell's `<&-` and `>&-`, or by whatever starts a job."""
    (tmp_path / "tokens").write_text("1 2 3 4")
    program = "import sys; from kv_core.tools.command import main; sys.exit(main())"

    def keys(arguments: str) -> tuple[int, str]:
        run = subprocess.run(
            ["sh", "-c", f'exec "$0" -c "$1" keys {arguments}', sys.executable, program],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return run.returncode, run.stderr

    assert keys("- <&-") == (2, "kv: error: standard input is closed; name a file instead of -\n")
    assert keys("tokens --chunk-tokens 2 >&-") == (0, "")


def test_a_command_that_does_not_exist_is_one_line_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explane"]) == 2
    assert capsys.readouterr().err == "kv: error: there is no command 'explane'; did you mean explain?\n"
    assert main(["xyzzy"]) == 2
    assert "see kv --help" in capsys.readouterr().err


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"kv [0-9.]+\S*\n", capsys.readouterr().out)
