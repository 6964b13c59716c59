"""Which answers call a tool, by the tokens that models' tokenizers have for that, and what vLLM says of a request."""

from types import SimpleNamespace
from typing import Any

import pytest
from kv_testing.spelling import TOOL_CALL
from kv_vllm.turns import Turns, marks_a_call
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import RequestStatus


@pytest.mark.parametrize(
    "token",
    [
        "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call|>", "<|call|>",
        "<|tool_calls_section_begin|>", "<｜tool▁call▁begin｜>", "<start_function_call>",
    ],
)  # fmt: skip
def test_a_token_of_a_call(token: str) -> None:
    assert marks_a_call(token)


@pytest.mark.parametrize(
    "token",
    [
        "<tool_response>", "[TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "<｜tool▁output▁begin｜>", "<|im_end|>", "<|recall|>",
        "<start_function_response>", "<|tool|>", "<think>",
    ],
)  # fmt: skip
def test_no_token_of_a_call(token: str) -> None:
    assert not marks_a_call(token)


def finished(
    *tokens: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED, structure: dict[str, Any] | None = None
) -> Any:
    sampling = SamplingParams(structured_outputs=structure and StructuredOutputsParams(**structure))
    return SimpleNamespace(output_token_ids=tokens, status=status, sampling_params=sampling)


def test_a_turn_has_ended_with_an_answer_without_a_call_once_calls_were_seen(spelling_llama: str) -> None:
    turns = Turns.of(ModelConfig(spelling_llama))
    assert not turns.has_ended(finished(5, 6))
    assert not turns.has_ended(finished(5, TOOL_CALL, 6))
    assert turns.has_ended(finished(5, 6))
    assert not turns.has_ended(finished(TOOL_CALL))
    for status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED):
        assert not turns.has_ended(finished(5, status=status))
    assert not turns.has_ended(finished(5, structure={"json": {"type": "array"}})), "a required call is JSON alone"
    assert turns.has_ended(finished(5, structure={"choice": ["yes", "no"]}))


def test_an_engine_without_a_tokenizer_is_told_nothing_by_its_answers(
    tiny_llama: str, caplog: pytest.LogCaptureFixture
) -> None:
    for turns in (Turns.of(ModelConfig(tiny_llama, skip_tokenizer_init=True)), Turns.of(SimpleNamespace())):
        assert not turns.has_ended(finished(TOOL_CALL)) and not turns.has_ended(finished(5))
