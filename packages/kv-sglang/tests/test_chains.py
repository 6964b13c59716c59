"""Which page comes before which: as told, across questions, and never more than fits."""

from kv_sglang.lanes import Chains


def test_a_prompts_pages_come_back_in_order_over_several_questions() -> None:
    chains = Chains()
    chains.tell(["a", "b", "c"])
    chains.tell(["c", "d"])
    chains.tell(["b", "x"])  # another prompt with the same beginning
    assert chains.before("d") == ["a", "b", "c"]
    assert chains.before("x") == ["a", "b"]
    assert chains.before("a") == chains.before("never told") == []


def test_what_was_told_longest_ago_is_forgotten() -> None:
    chains = Chains(max_pages=3)
    chains.tell(["a", "b", "c"])
    chains.tell(["a", "b"])  # told again
    chains.tell(["p", "q", "r"])
    assert chains.before("b") == ["a"]
    assert chains.before("c") == []
    assert chains.before("r") == ["p", "q"]


def test_a_circle_ends() -> None:
    """No hash is its own ancestor, but a bug elsewhere must not hang the scheduler."""
    chains = Chains(max_pages=4)
    chains.tell(["a", "b", "a"])
    assert len(chains.before("a")) <= 4
