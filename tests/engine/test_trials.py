"""Trials against a model: an engine that plans steps ahead, loads of others that fail at any of them, reports that come
when they must. Nothing is committed that could hold what was computed from a failed block."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_vllm.trials import NO_TRIAL, Trials


@settings(max_examples=300, deadline=None)
@given(
    ahead=st.integers(0, 3),
    steps=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40),
)
def test_nothing_is_committed_before_all_loads_before_it_are_known_to_be_good(
    ahead: int, steps: list[tuple[bool, bool]]
) -> None:
    """ahead: steps that are planned before the output of a step comes. steps: whether each has loads of others, and
    whether these fail."""
    trials = Trials(is_alone=False)
    flying: list[tuple[int, int, bool]] = []  # the step, its trial, whether it fails
    stored: dict[int, list[int]] = {}  # by trial, the steps that await its verdict
    doubtful: set[int] = set()  # steps whose output has not come, and that compute with loads of others
    failed: set[int] = set()

    def output() -> None:
        step, trial, fails = flying.pop(0)
        doubtful.discard(step)
        if fails:
            failed.add(step)
        trials.receive(trial, {1} if fails else set())

    for number, (loads, fails) in enumerate(steps):
        trial = trials.begin(has_loads=loads, has_ours=False)
        message = trials.to_send()
        assert message.trial == trial
        for verdict, passed in message.verdicts:
            if not passed:
                stored.pop(verdict, None)
            assert not (passed and set(stored.pop(verdict, [])) & failed)
        if loads:
            doubtful.add(number)
        before = set(doubtful)
        assert bool(trial) == bool(before), "on trial exactly while something is in doubt"
        if trial:
            stored.setdefault(trial, []).extend([number, *before])
        flying.append((number, trial, loads and fails))
        while len(flying) > ahead:
            output()
    while flying:
        output()
    for verdict, passed in trials.take_verdicts():
        assert not (passed and set(stored.pop(verdict, [])) & failed)
    assert not trials.are_open and trials.to_send() == NO_TRIAL


class Half:
    def __init__(self) -> None:
        self.distrusted: set[str] = set()
        self.forgotten: list[tuple[str, int, int]] = []

    def not_filled(self, request_id: str, first_token: int, *, judged: int) -> None:
        self.forgotten.append((request_id, first_token, judged))

    def distrust(self, request_id: str) -> None:
        self.distrusted.add(request_id)


def step(tables: dict[str, list[int]], computed: dict[str, int], **scheduled: int) -> tuple[Any, Any]:
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (tables[name],)),
    )
    return output, {name: (SimpleNamespace(num_computed_tokens=computed[name]), None) for name in tables}


def test_who_reads_a_failed_block_before_it_is_computed_again_is_not_stored() -> None:
    """In blocks of 10 tokens. `a` owns them, `b` and `c` found them in vLLM's own cache."""
    half: Any = Half()
    trials = Trials(is_alone=False)
    tables = {"a": [1, 2, 3, 4], "b": [1, 2, 3, 5], "c": [1, 2, 3, 6], "d": [1, 7]}
    trials.failed({2}, {"a": tables["a"]}, 10, half)
    assert [each[:2] for each in half.forgotten] == [("a", 10)]
    # The owner computes the first half of them again, beside one that reads all of them and one that reads none.
    trials.follow(*step(tables, {"a": 10, "b": 30, "c": 30, "d": 10}, a=10, b=5, d=5), 10, half)
    assert half.distrusted == {"b"}
    trials.follow(*step(tables, {"a": 20, "b": 35, "c": 30, "d": 15}, a=20), 10, half)
    trials.follow(*step(tables, {"a": 40, "b": 35, "c": 30, "d": 15}, c=5), 10, half)
    assert half.distrusted == {"b"}  # what `c` reads is right again
    trials.follow(*step({"e": [1, 2, 3, 5, 8]}, {"e": 40}, e=5), 10, half)
    assert half.distrusted == {"b", "e"}  # what `b` had computed is not


def test_a_suspect_block_that_gets_another_use_is_suspect_no_longer() -> None:
    half: Any = Half()
    trials = Trials(is_alone=False)
    trials.failed({2}, {"a": [1, 2, 3]}, 10, half)
    trials.looked_up("b", 10)
    trials.allocated("b", SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 10)  # of which it has found the first
    trials.follow(*step({"b": [1, 2, 3]}, {"b": 30}, b=1), 10, half)
    assert not half.distrusted


def test_a_failure_of_our_own_forgets_nothing() -> None:
    half: Any = Half()
    trials = Trials(is_alone=True)
    assert trials.begin(has_loads=True, has_ours=True) == 0
    trials.failed({2}, {"a": [1, 2, 3]}, 10, half)
    assert half.forgotten == [("a", 10, -1)]
