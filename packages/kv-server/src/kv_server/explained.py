"""What became of a prompt, in words: for `kv explain` and `POST /explain`."""

from kv_core.cost import Choice
from kv_observe.chunk_state import ChunkState
from kv_observe.explain import is_held
from kv_tiers.index.life import BEING_WRITTEN

from kv_server import wire

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
_CAUSES = {
    "store": "to make room for a prompt",
    "promotion": "to make room for chunks being promoted",
    "watermark": "to keep slots free",
    "quota": "to keep within its tenant's quota",
    "upgrade": "to make other chunks exact",
}

_GROUPS = {
    "window": "the sliding window of group {}",
    "local": "the chunked local attention of group {}",
    "state": "the state of group {}",
}


def explained_text(expected: wire.Explained, answer: wire.Explanations) -> list[str]:
    """A line for each run of chunks that are alike, and what a request would get."""
    lines = runs_text(expected, answer)
    if expected.held < expected.prefix:
        lines.append(f"the hit ends at chunk {expected.held}: for a longer one, some layers lack what they need")
    for lacking in expected.lacking:
        name = _GROUPS[lacking.coverage.partition(":")[0]].format(lacking.group)
        for state in lacking.states:
            lines.append(f"{chunks_text(state.first, state.chunks)} of {name}: {_why_missing(state, answer)}")
    if expected.choice is not None and expected.held:
        lines.append(_choice_text(expected.choice))
    has_gap = not all(map(is_held, expected.states))
    if (has_gap or expected.lacking) and expected.remote_tiers_skipped:
        lines.append(f"skipped, because querying them takes a network: {', '.join(expected.remote_tiers_skipped)}")
    for name, directory in expected.directories.items():
        lines.append(f"the directory of {name}: {directory.spelled()}")
    return lines


def runs_text(expected: wire.Explained, answer: wire.Explanations) -> list[str]:
    """Where its chunks are."""
    lines, has_gap = [], False
    for state in expected.states:
        text = f"in {state.where}" if is_held(state) else _why_missing(state, answer)
        if is_held(state) and has_gap:
            text += ", but of no use: an earlier chunk is missing"
        lines.append(f"{chunks_text(state.first, state.chunks)}: {text}")
        has_gap = has_gap or not is_held(state)
    if expected.is_cut:
        lines.append("and more, which the server left out")
    return lines


def _choice_text(choice: Choice) -> str:
    """What a request would get now, with both estimates."""
    load, compute = _seconds_text(choice.load_s), _seconds_text(choice.compute_s)
    parts = []
    if choice.chunks:
        parts.append(f"{choice.chunks} chunks loaded, estimated at {load}: computing them takes {compute}")
    elif choice.load_s != 0.0:
        parts.append(f"computed, estimated at {compute}: loading takes {load}")
    if (skipped := choice.skipped) is not None:
        load, compute = _seconds_text(skipped.load_s), _seconds_text(skipped.compute_s)
        parts.append(
            f"{skipped.chunks} chunks in {skipped.tier} computed, estimated at {compute}: loading them takes {load}"
        )
    return f"if it were requested now: {'; '.join(parts)}"


def _seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "a time not known yet"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def chunks_text(first: int, chunks: int) -> str:
    return f"chunk {first}" if chunks == 1 else f"chunks {first}–{first + chunks - 1}"


def _why_missing(state: ChunkState, answer: wire.Explanations) -> str:
    ago = "" if state.seconds_ago is None else f" {_span(state.seconds_ago)} ago"
    remote = {tier for explained in answer.explained for tier in explained.remote_tiers_skipped}
    below = ""
    if gone := [tier for tier in state.below if tier not in remote]:
        below += f"; stored in {', '.join(gone)} since, and not there now"
    if not_queried := [tier for tier in state.below if tier in remote]:
        below += f"; stored in {', '.join(not_queried)} since, which was not queried: a request will query it"
    if state.where == BEING_WRITTEN:
        return "being written just now"
    if state.diverges and not state.what:
        return "where this prompt diverges from what was stored: other prompts went on differently here"
    match state.what:
        case "":
            return why_unknown(answer)
        case "evicted":
            cause = _CAUSES.get(state.cause, state.cause)
            return f"evicted{ago} from {state.tier} by {state.policy} {cause}{below}"
        case "damaged":
            return f"discarded{ago}, as its bytes in {state.tier} were wrong: {state.cause}"
        case "refused":
            return f"found no room{ago}: {state.cause}"
        case "aborted":
            return f"begun{ago} and never finished: its writer gave up or ended"
        case "forgotten":
            return f"forgotten{ago} on request"
        case _:
            return f"stored{ago}, and left a moment ago{below}"


def why_unknown(answer: wire.Explanations) -> str:
    """Of chunks that are not held, and of which nothing is remembered."""
    if not answer.history_keys:
        return "not held; this server remembers nothing (history_keys = 0), so it cannot say more"
    if answer.is_whole:
        return f"not stored here since the server started, {_span(answer.remembered_s)} ago"
    return f"not held, and not among the last {answer.history_keys} keys that the server remembers"


def _span(seconds: float) -> str:
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
