"""What a forward pass waits for: each layer, no longer, and never for ever."""

import threading
from collections.abc import Callable

import pytest
from kv_core.errors import CopyFailed
from kv_cuda.copy.streams import DoneEvent
from kv_sglang.lanes import LayerGate

SOON_S = 10.0


class FailedEvent:
    def done(self) -> bool:
        raise CopyFailed("the device is gone")

    def wait(self) -> None:
        raise CopyFailed("the device is gone")

    def hold_engine(self) -> None:
        self.wait()


def waiting(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers


def test_a_layer_is_waited_for_until_it_is_let_through() -> None:
    gate = LayerGate()
    number = gate.open()
    gate.set_consumer(number)
    gate.let_through(number, DoneEvent())
    gate.wait_until(0)
    thread, _ = waiting(lambda: gate.wait_until(1))
    assert thread.is_alive()
    gate.let_through(number, DoneEvent())
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_layers_that_never_come_hold_nobody_up_and_finish_says_so() -> None:
    gate = LayerGate()
    number = gate.open()
    gate.set_consumer(number)
    passing, _ = waiting(lambda: gate.wait_until(2))
    finishing, answers = waiting(lambda: gate.finish(number))
    gate.end(number, landed=False)
    passing.join(SOON_S)
    finishing.join(SOON_S)
    assert not passing.is_alive()
    assert answers == [False]


def test_a_copy_that_failed_does_not_raise_into_the_forward_pass() -> None:
    gate = LayerGate()
    number = gate.open()
    gate.set_consumer(number)
    gate.let_through(number, FailedEvent())
    gate.wait_until(0)


@pytest.mark.parametrize("consumer", [-1, 7])
def test_a_pass_that_reads_no_batch_waits_for_nothing(consumer: int) -> None:
    gate = LayerGate()
    gate.open()
    gate.set_consumer(consumer)
    gate.wait_until(0)
    assert gate.finish(consumer)


def test_batches_are_apart() -> None:
    gate = LayerGate()
    first, second = gate.open(), gate.open()
    assert first != second
    gate.end(second, landed=True)
    assert gate.finish(second)
    gate.end(first, landed=False)
    gate.finish_all()
    assert gate.finish(first)  # it is over, and forgotten
    assert gate.consumer_index == -1


def test_a_pass_that_could_not_wait_for_a_layer_is_not_one_that_has_read_it() -> None:
    """Even if the layer has landed by the time that anybody asks again."""

    class Silent(DoneEvent):
        def hold_engine(self) -> None:
            raise RuntimeError("the device is recording a graph")

    gate = LayerGate()
    number = gate.open()
    gate.set_consumer(number)
    gate.let_through(number, Silent())
    gate.wait_until(0)
    gate.end(number, landed=True)
    assert not gate.finish(number)
