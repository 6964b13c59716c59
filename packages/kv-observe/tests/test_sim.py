"""The simulator counts what a person counts by hand, and `kv sim` says what is wrong with a trace and where."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import ConfigError, InputError
from kv_core.keys import ChunkKey
from kv_core.tools.cli import main
from kv_eviction import POLICY_NAMES
from kv_observe import sim_cli
from kv_observe.sim import TierPlan, optimum, simulate
from kv_observe.trace_file import read_trace, trace_key

SMALL = "a b c\nd e\na b x\nd e f\na b c\n"
"""Under LRU with 5 chunks: miss 3, miss 2, hit a b, (c leaves for x), hit d e, (x leaves for f), hit a b: 6 of 14."""


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.fixture
def small(tmp_path: Path) -> str:
    return written(tmp_path / "small.txt", SMALL)


def keys(text: str) -> list[list[ChunkKey]]:
    return [[trace_key(word) for word in line.split()] for line in text.splitlines()]


def test_hits_are_those_counted_by_hand() -> None:
    served = simulate(keys(SMALL), [TierPlan("host", 5, "lru")], warm_up=0)
    assert (served.requests, served.chunks_asked, served.chunks_hit) == (5, 14, 6)
    (host,) = served.tiers
    assert (host.chunks_stored, host.chunks_evicted) == (8, 3)


def test_requests_that_warm_up_do_not_count() -> None:
    served = simulate(keys(SMALL), [TierPlan("host", 5, "lru")], warm_up=0.4)
    assert (served.requests, served.chunks_asked, served.chunks_hit) == (3, 9, 6)
    assert served.tiers[0].chunks_stored == 3


def test_a_chunk_behind_a_missing_one_is_no_hit() -> None:
    prompts = keys("a b\nc d e\na b")  # a leaves for e: not d, nor c, which e follows
    assert simulate(prompts, [TierPlan("host", 4, "lru")], warm_up=0).chunks_hit == 1
    assert simulate(prompts, [TierPlan("host", 3, "lru")], warm_up=0).chunks_hit == 0


def test_what_is_evicted_goes_down_and_what_is_hit_comes_up() -> None:
    prompts = keys("a b c\nd e f\na b c\na b c")
    served = simulate(prompts, [TierPlan("host", 3, "lru"), TierPlan("disk", 6, "lru")], warm_up=0)
    host, disk = served.tiers
    assert (host.chunks_hit, disk.chunks_hit) == (3, 3)
    assert (host.chunks_stored, host.chunks_evicted) == (9, 6)
    assert (disk.chunks_stored, disk.chunks_evicted) == (6, 0)


def test_a_chain_across_two_tiers_is_one_hit() -> None:
    prompts = keys("a b c\nd\na b c")  # c is spilled for d
    served = simulate(prompts, [TierPlan("host", 3, "lru"), TierPlan("disk", 9, "lru")], warm_up=0)
    assert [tier.chunks_hit for tier in served.tiers] == [2, 1]


def test_a_full_lower_tier_loses_for_good() -> None:
    prompts = keys("a\nb\nc\na")
    served = simulate(prompts, [TierPlan("host", 1, "lru"), TierPlan("disk", 1, "lru")], warm_up=0)
    assert served.chunks_hit == 0
    assert served.tiers[1].chunks_evicted == 2


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="no eviction policy 'belady'"):
        simulate(keys(SMALL), [TierPlan("host", 5, "belady")])


def test_the_optimum_by_hand() -> None:
    assert optimum(keys("a b\nc d\na b\nc d"), 2, warm_up=0).hit_ratio == 2 / 8  # one pair, not a half of each
    assert optimum(keys("a b\nc d\na b\nc d"), 4, warm_up=0).hit_ratio == 4 / 8
    assert optimum(keys("a\nb\nc\na"), 1, warm_up=0).hit_ratio == 1 / 4  # b and c are not kept at all


chains = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=4).map(
        lambda way: [trace_key(str(way[: depth + 1])) for depth in range(len(way))]
    ),
    min_size=1,
    max_size=30,
)


@given(prompts=chains, capacity=st.integers(1, 12), name=st.sampled_from(POLICY_NAMES))
@settings(deadline=None, max_examples=150)
def test_no_policy_passes_the_optimum(prompts: list[list[ChunkKey]], capacity: int, name: str) -> None:
    ratio = simulate(prompts, [TierPlan("host", capacity, name)], warm_up=0).hit_ratio
    assert ratio <= optimum(prompts, capacity, warm_up=0).hit_ratio + 1e-12


@given(prompts=chains, name=st.sampled_from(POLICY_NAMES))
@settings(deadline=None, max_examples=50)
def test_with_room_for_all_every_repeat_is_a_hit(prompts: list[list[ChunkKey]], name: str) -> None:
    seen: set[ChunkKey] = set()
    hits = 0
    for prompt in prompts:
        hits += sum(key in seen for key in prompt)
        seen.update(prompt)
    assert simulate(prompts, [TierPlan("host", len(seen), name)], warm_up=0).chunks_hit == hits


def test_both_formats_plain_and_gzipped(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain", "# ours\n@1.5 1 2 3  # first\n\n@4 1 2 4\n")
    lines = [{"timestamp": 1500, "hash_ids": [1, 2, 3]}, {"timestamp": 4000, "hash_ids": [1, 2, 4]}]
    mooncake = "\n".join(map(json.dumps, lines))
    gzipped = tmp_path / "mooncake.gz"
    gzipped.write_bytes(gzip.compress(mooncake.encode()))
    marked = written(tmp_path / "marked", f"\ufeff{mooncake}")  # as some editors begin UTF-8
    for path in (plain, written(tmp_path / "mooncake", mooncake), str(gzipped), marked):
        trace = read_trace(path)
        assert trace.prompts == keys("1 2 3\n1 2 4")
        assert (trace.chunks_unique, trace.span_s) == (4, 2.5)


def test_a_trace_may_come_through_a_pipe() -> None:
    """`kv sim <(zcat trace.gz)`. What was read to see whether it is gzipped was lost: the first 8 KiB, and the rest
    of the line that they ended in was taken for a request."""
    text = "".join(f'{{"timestamp": {number}, "hash_ids": [{number}, {number + 5000}]}}\n' for number in range(1000))
    for data in (text.encode(), gzip.compress(text.encode())):
        reader, writer = os.pipe()
        try:
            with open(writer, "wb") as pipe:
                assert pipe.write(data) == len(data) < 1 << 16  # which is room for all of it
            trace = read_trace(f"/dev/fd/{reader}")
        finally:
            os.close(reader)
        assert (len(trace.prompts), trace.chunks_unique, trace.span_s) == (1000, 2000, 0.999)


RECORDED = '{"kv_trace":1,"chunk_tokens":256,"chunk_bytes":4096,"keys_per_chunk":1}\n'


@pytest.mark.parametrize("half", ['{"kv_tr', '{"timestamp":15,"hash_ids":[17', '{"ti', "{", '{"timestamp":1{"ti'])
@pytest.mark.parametrize("ending", ["\n", "", "# 3 requests were left out\n"])
def test_half_a_line_of_what_was_recorded_costs_no_other_line(tmp_path: Path, half: str, ending: str) -> None:
    """ending: of earlier releases, the next record began on that line."""
    before = '{"timestamp":1000,"hash_ids":[1,2],"more":{}}\n'
    after = '{"timestamp":2000,"hash_ids":[1,2,3]}\n'
    if half.startswith('{"k'):
        after = RECORDED + after  # the next process says its own
    trace = read_trace(written(tmp_path / "t", f"{RECORDED}{before}{half}{ending}{after}"))
    assert trace.prompts == keys("1 2\n1 2 3") or (not ending and trace.prompts == keys("1 2"))
    assert trace.half_lines == 1 and trace.chunk_tokens == 256
    if not half.startswith('{"ti'):
        assert read_trace(written(tmp_path / "u", f"{half}\n{RECORDED}{after}")).half_lines == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a b\na c a\n", ":2: a chunk id appears twice"),
        ("a b\nb c\n", ":2: chunk b follows a different chunk than before"),
        ("@soon a\n", ":1: '@soon' is not a time"),
        ("@inf a\n", ":1: '@inf' is not a time"),
        ("a\n@3\n", ":2: a request without chunks"),
        ('{"hash_ids": [1, 2\n', ":1: begins like a JSON object but is not one"),
        ('{"hash_ids": [1]}\n{"ids": [1]}\n', ":2: hash_ids must be a list of whole numbers"),
        ('{"hash_ids": [1, true]}\n', ":1: hash_ids must be a list of whole numbers"),
        ('{"hash_ids": []}\n', ":1: a request without chunks"),
        ('{"hash_ids": [1], "timestamp": "now"}\n', ":1: timestamp must be a number"),
        pytest.param(
            f'{{"hash_ids": [1], "timestamp": {10**400}}}\n',
            ":1: timestamp must be a number",
            id="no float is so large",
        ),
        ('{"hash_ids": [1], "timestamp": NaN}\n', ":1: timestamp must be a number"),
        ("# nothing\n", "it has no requests"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path / "bad", text)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(path)
    assert complaint in str(caught.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(SMALL.encode() * 100)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="the gzip file is damaged"):
        read_trace(str(cut))
    (tmp_path / "latin").write_bytes(b"a b\n\xff\xfe\n")
    with pytest.raises(InputError, match="not UTF-8"):
        read_trace(str(tmp_path / "latin"))


def test_the_command_counts_and_converts(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sim", small, "--capacity", "5", "--warm-up", "0%", "--json", "--policy", "lru,opt"]
    assert main([*words, "--chunk-tokens", "16", "--token-bytes", "1KiB", "--bandwidth", "host=1"]) == 0
    lru, opt = map(json.loads, capsys.readouterr().out.splitlines())
    assert (lru["policy"], lru["capacity_chunks"], lru["capacity_bytes"]) == ("lru", 5, 5 * 16 * 1024)
    assert (lru["tokens_asked"], lru["tokens_hit"]) == (14 * 16, 6 * 16)
    assert lru["hit_ratio"] == pytest.approx(6 / 14)
    (host,) = lru["tiers"]
    assert (host["bytes_read"], host["bytes_written"]) == (6 * 16384, 8 * 16384)
    assert host["read_s"] == pytest.approx(6 * 16384 / 1e9)
    assert (opt["policy"], "tiers" in opt) == ("opt", False)
    assert opt["hit_ratio"] >= lru["hit_ratio"]


def test_capacities_are_chunks_bytes_or_a_part(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sim", small, "--capacity", "5,50%,1.5MiB,2MB", "--json", "--token-bytes", "512KiB", "--chunk-tokens", "1"]
    assert main(words) == 0
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["capacity_chunks"] for line in lines] == [5, 3, 3, 3]  # of 7 unique chunks of 512 KiB


def test_where_all_requests_warm_up_none_counts(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    served = simulate(keys(SMALL), [TierPlan("host", 5, "lru")], warm_up=1.0)
    assert (served.requests, served.chunks_asked, [tier.name for tier in served.tiers]) == (0, 0, ["host"])
    assert main(["sim", small, "--capacity", "3", "--warm-up", "100%"]) == 0
    assert " host " in capsys.readouterr().out.splitlines()[-1]


def test_a_part_of_the_chunks_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path / "hundred.txt", " ".join(map(str, range(100))))
    assert main(["sim", trace, "--capacity", "29%,57%,99.9%", "--json"]) == 0
    assert [json.loads(line)["capacity_chunks"] for line in capsys.readouterr().out.splitlines()] == [29, 57, 99]


def test_the_table_shows_every_tier(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", small, "--capacity", "3", "--below", "disk=100%", "--warm-up", "0%"]) == 0
    out = capsys.readouterr().out
    assert "5 requests, 7 unique chunks" in out
    host, disk = out.splitlines()[2:]
    assert host.split()[:3] == ["prefix", "3", "42.86%"]
    assert " host " in host
    assert disk.split()[0] == "disk"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--capacity", "lots"], "--capacity lots: write a number with a unit"),
        (["--capacity", "lots"], "512B; or chunks, or 5%\n"),
        (["--capacity", "0"], "--capacity 0 holds no chunk"),
        (["--capacity", "120%"], "from 0% to 100%"),
        (["--capacity", "1KiB"], "holds no chunk; one takes 64 MiB"),
        (["--capacity", "3", "--policy", "lru,belady"], "no eviction policy 'belady'"),
        (["--capacity", "3", "--below", "disk"], "--below disk: write NAME=CAPACITY"),
        (["--capacity", "3", "--below", "host=3"], "names must differ"),
        (["--capacity", "3", "--below", "disk=3:lur"], "did you mean 'lru'"),
        (["--capacity", "3", "--below", "disk=3", "--policy", "opt"], "opt is for one tier"),
        (["--capacity", "3", "--bandwidth", "disk=3"], "there is no such tier; there are host"),
        (["--capacity", "3", "--bandwidth", "host=fast"], "write NAME=GB/S"),
        (["--capacity", "3", "--chunk-tokens", "0"], "at least one token"),
        (["--capacity", "50%", "--chunk-tokens", "1" + "0" * 400], "at most 1048576"),
        (
            ["--capacity", "3", "--token-bytes", "5%"],
            "--token-bytes 5%: write a number with a unit, such as 64GiB, 2TB or 512B\n",
        ),
        (["--capacity", "3", "--token-bytes", "0.3B"], "--token-bytes 0.3B: write a number with a unit"),
        (["--capacity", "3", "--warm-up", "half"], "--warm-up half: write a part"),
        (["--capacity", "3", "--plot", "hits.gif"], "end the name in one of .svg"),
    ],
)
def test_a_wrong_option_is_answered(
    small: str, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", small, *words]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.out == ""


def test_a_trace_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", str(tmp_path / "none"), "--capacity", "3"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_policy_is_told_by_the_stops_of_a_trace_if_it_has_them(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"hash_ids": [number, -number - 1], "stop": "end_turn" if number % 3 else "tool_use"} for number in range(9)
    ]
    (tmp_path / "stops.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_trace(str(tmp_path / "stops.jsonl")).turn_ends == [bool(number % 3) for number in range(9)]
    assert read_trace(small).turn_ends == []
    words = ["--capacity", "3", "--policy", "prefix,prefix+stops", "--json"]
    assert main(["sim", str(tmp_path / "stops.jsonl"), *words]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["policy"] for row in rows] == ["prefix", "prefix+stops"]
    assert main(["sim", small, *words]) == 2
    assert "does not say why answers ended (stop); leave out +stops" in capsys.readouterr().err


def test_hints_that_say_what_is_never_requested_again_make_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After each of two prompts in turn comes one that never returns."""
    lines = [{"hash_ids": ids} for new in range(20) for ids in ([1 + new % 2], [100 + new, 200 + new])]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--capacity", "4", "--policy", "lru,lru+hints,opt", "--json"]
    assert main(["sim", str(tmp_path / "t.jsonl"), *words]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["policy"]: row["hit_ratio"] for row in rows} == {"lru": 0, "lru+hints": 1 / 3, "opt": 1 / 3}


def test_a_plot_is_drawn(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "hits.svg"
    assert main(["sim", small, "--capacity", "2,5", "--policy", "lru,opt", "--plot", str(path)]) == 0
    drawn = path.read_text()
    assert drawn.startswith("<?xml")
    assert "small.txt" in drawn
    assert "opt" in drawn


def test_without_its_library_a_plot_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_cli.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'kv-observe\[plot\]'"):
        sim_cli.check_plot("hits.svg")


def test_long_runs_say_how_far_they_are(
    small: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kv_observe.sim_cli._PROGRESS_EVERY_S", 0.0)
    path = written(tmp_path / "long", "a b\n" * 256)
    assert main(["sim", path, "--capacity", "2"]) == 0
    captured = capsys.readouterr()
    assert "kv sim:  25% done" in captured.err
    assert "done" not in captured.out


@pytest.mark.parametrize("text", ["chunk_tokens: 256\nhost:\n  capacity_bytes: 4GiB\n", "chunk_tokens = 256\n[host]\n"])
def test_settings_are_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(text)
    assert main(["sim", str(file), "--capacity", "10"]) == 2
    assert "no file of settings" in capsys.readouterr().err
