"""Which answers call a tool, by the tokens that models' tokenizers have for that, and what vLLM says of a request."""

from types import SimpleNamespace
from typing import Any

import pytest
from kv_connect.turns import marks_a_call
from kv_testing.spelling import TOOL_CALL
from kv_vllm.translate import has_ended_turn, turns_of
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
    turns = turns_of(ModelConfig(spelling_llama))
    assert not has_ended_turn(finished(5, 6), turns)
    assert not has_ended_turn(finished(5, TOOL_CALL, 6), turns)
    assert has_ended_turn(finished(5, 6), turns)
    assert not has_ended_turn(finished(TOOL_CALL), turns)
    for status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED):
        assert not has_ended_turn(finished(5, status=status), turns)
    required = finished(5, structure={"json": {"type": "array"}})
    assert not has_ended_turn(required, turns), "a required call is JSON alone"
    assert has_ended_turn(finished(5, structure={"choice": ["yes", "no"]}), turns)


def test_an_engine_without_a_tokenizer_is_told_nothing_by_its_answers(
    tiny_llama: str, caplog: pytest.LogCaptureFixture
) -> None:
    for turns in (turns_of(ModelConfig(tiny_llama, skip_tokenizer_init=True)), turns_of(SimpleNamespace())):
        assert not has_ended_turn(finished(TOOL_CALL), turns) and not has_ended_turn(finished(5), turns)
