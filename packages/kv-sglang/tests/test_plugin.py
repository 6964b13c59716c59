"""Tags leave a request for its `extra_key`, and marks become `retain_s`; nothing else of it changes."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from kv_connect.cache_control import RETAIN_S
from kv_connect.request_options import root_of
from kv_core.hashing import ChainScheme
from kv_sglang.plugin import enter

ROOT = "kv_tiers:" + ChainScheme().root(tags={"a": "1"}).hex()
TAGGED = {"temperature": 0, "custom_params": {"kv_tiers": {"tags": {"a": "1"}, "store": False}, "other": 1}}
WITHOUT = {"temperature": 0, "custom_params": {"kv_tiers": {"store": False}, "other": 1}}


def entered(sampling: Any, extra_key: Any = None, seconds: int = 0) -> tuple[Any, Any]:
    """`sampling_params` and `extra_key` after it. The client's own stay as they are."""
    before = copy.deepcopy(sampling)
    obj = SimpleNamespace(sampling_params=sampling, extra_key=extra_key)
    enter(obj, {RETAIN_S: seconds} if seconds else {})
    assert sampling == before
    return obj.sampling_params, obj.extra_key


@pytest.mark.parametrize(
    ("sampling", "extra_key", "after"),
    [
        (TAGGED, None, (WITHOUT, ROOT)),
        (TAGGED, "mine", (WITHOUT, "mine" + ROOT)),
        (TAGGED, ["x", "y"], (WITHOUT, ["x" + ROOT, "y" + ROOT])),
        ([TAGGED, {}], None, ([WITHOUT, {}], [ROOT, ""])),
        ([{}, TAGGED], ["x", "y"], ([{}, WITHOUT], ["x", "y" + ROOT])),
        ([{}, TAGGED], ["x"], ([{}, TAGGED], ["x"])),  # SGLang refuses it
        ({"custom_params": {"kv_tiers": {"tags": {}}}}, "k", ({"custom_params": {"kv_tiers": {}}}, "k")),
    ],
)
def test_tags_are_part_of_the_key_of_the_request_that_has_them(sampling: Any, extra_key: Any, after: Any) -> None:
    assert entered(sampling, extra_key) == after


@pytest.mark.parametrize("tags", [None, "a", {"a b": "1"}, {"a": 1}, {"a": "\ud800"}, {str(n): "" for n in range(17)}])
def test_invalid_tags_stay_for_the_scheduler_to_refuse(tags: Any) -> None:
    sampling = {"custom_params": {"kv_tiers": {"tags": tags}}}
    assert entered(sampling, "k") == (sampling, "k")


@pytest.mark.parametrize("sampling", [TAGGED, [TAGGED]])
def test_tags_stay_where_there_is_no_key_that_could_have_them(sampling: Any) -> None:
    """Else the request would be served as one without."""
    obj = SimpleNamespace(sampling_params=sampling, extra_key=[5])
    with pytest.raises(TypeError):
        enter(obj, {})
    assert (obj.sampling_params, obj.extra_key) == (sampling, [5])


@pytest.mark.parametrize("sampling", [None, {}, [], "text", {"custom_params": "x"}, {"custom_params": {"kv_tiers": 1}}])
def test_a_request_without_options_stays_as_it_is(sampling: Any) -> None:
    assert entered(sampling) == (sampling, None)


def test_marks_are_an_option_unless_the_request_has_it_itself() -> None:
    assert entered(None, seconds=300) == ({"custom_params": {"kv_tiers": {"retain_s": 300}}}, None)
    after, key = entered(TAGGED, seconds=300)
    assert after["custom_params"] == {"kv_tiers": {"store": False, "retain_s": 300}, "other": 1}
    assert key == ROOT
    own = {"custom_params": {"kv_tiers": {"retain_s": 5}}}
    assert entered(own, seconds=300) == (own, None)


def test_the_order_of_tags_does_not_matter() -> None:
    assert root_of({"a": "1", "b": "2"}) == root_of({"b": "2", "a": "1"}) != root_of({"a": "12", "b": ""})
