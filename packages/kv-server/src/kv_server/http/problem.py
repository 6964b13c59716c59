"""Errors as problem documents (RFC 9457): what was wrong, and what to do about it."""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response


class ProblemDocument(msgspec.Struct, frozen=True):
    """title: the status in words. detail: what was wrong with this request, and what to do."""

    title: str
    status: int
    detail: str


class Problem(Exception):  # noqa: N818  # an answer, not a fault of ours
    """Raised while a request is answered, and becomes its answer."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})


def problem_response(problem: Problem) -> Response:
    document = ProblemDocument(HTTPStatus(problem.status).phrase, problem.status, problem.detail)
    return Response(
        msgspec.json.encode(document), problem.status, problem.headers, media_type="application/problem+json"
    )
