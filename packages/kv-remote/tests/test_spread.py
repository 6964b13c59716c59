"""Work that is spread over threads: each item once, in order, and by the caller if there are no threads."""

import threading

import pytest
from kv_remote.shared_fs import spread
from kv_testing.threads import threads_left


@pytest.mark.parametrize(("items", "threads"), [(0, 4), (1, 4), (7, 1), (7, 3), (3, 7)])
def test_each_item_has_its_result(items: int, threads: int) -> None:
    assert spread(lambda item: item * item, range(items), threads) == [item * item for item in range(items)]


def test_items_are_worked_on_at_the_same_time() -> None:
    together = threading.Barrier(3)
    spread(lambda _: together.wait(timeout=10), range(3), 3)


@pytest.mark.parametrize("left", [0, 1])
def test_where_the_system_has_no_more_threads_the_others_do_the_work(left: int) -> None:
    with threads_left(left):
        assert spread(str, range(5), 4) == ["0", "1", "2", "3", "4"]


def test_an_error_is_raised_when_nothing_runs_any_more() -> None:
    begun: list[int] = []

    def fail(item: int) -> None:
        begun.append(item)
        raise OSError(item)

    with pytest.raises(OSError, match=r"^[0-9]+$"):
        spread(fail, range(1000), 3)
    assert len(begun) <= 3, "nothing is begun after an error, but by each thread what it had begun"
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-helper"]
