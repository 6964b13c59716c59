"""What the policy learns of answers that call a tool and of those that call none, whichever engine gives them."""

from collections.abc import Callable

from kv_testing.spelling import TOOL_CALL
from kv_testing.wait import until


def assert_turns_end_without_calls(answer: Callable[[str, int], None], ended: Callable[[], int]) -> None:
    """Once one answer has called a tool, those that call none end their user's turn.

    answer: has the engine answer the prompt of this name with this token. ended: how many turns it has counted.
    """
    answer("before any call", 7)
    answer("a call", TOOL_CALL)
    answer("another call", TOOL_CALL)
    assert ended() == 0
    answer("words", 7)
    until(lambda: ended() == 1, 30)
