"""The OpenAPI document, generated from the table of operations that also serves requests."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response

from kv_server.connection import PACKAGE
from kv_server.http.operation import Operation, ProblemDocument

_ABOUT: Final = """\
A server that keeps KV chunks for engines of one host. Reading needs no token; changing needs that of http.token_file,
as a bearer. Errors are answered with a problem document that says what to do.
"""
_REFERENCE: Final = "#/components/schemas/{name}"
_PYTHONS_OWN: Final = msgspec.json.encode(r"$(?!\n)")[1:-1]
"""The end of a pattern (`kv_tiers.options.spelled_as`). Elsewhere `$` alone is the end, and not all can look ahead."""


def openapi_document(operations: Sequence[Operation]) -> dict[str, Any]:
    """OpenAPI 3.1. Raises `TypeError`: a type of an operation cannot be described."""
    types = {type_ for operation in operations for type_ in (operation.answer, operation.body)} - {None, Response}
    ordered = [ProblemDocument, *sorted(types, key=str)]
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, schema_of)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "kv-server", "version": PACKAGE, "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }
    described: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document).replace(_PYTHONS_OWN, b"$"))
    return described


def _described(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    failures = set(operation.failures)
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": "_".join([operation.method.lower(), *re.findall(r"\w+", operation.path)]),
        "responses": {},
    }
    if operation.answer is Response:
        answer = _response(operation.status, {"type": "string"}, "text/plain")
    else:
        answer = _response(operation.status, schema_of[operation.answer])
    described["responses"][str(operation.status)] = answer
    if names := re.findall(r"{(\w+)}", operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if operation.body is not None:
        failures |= {400, 408, 413, 415}
        described["requestBody"] = {
            "required": operation.needs_body,
            "content": {"application/json": {"schema": schema_of[operation.body]}},
        }
    if operation.changes_something:
        failures |= {401, 403}
        described["security"] = [{"token": []}]
    for status in sorted(failures | {421}):
        described["responses"][str(status)] = _response(status, schema_of[ProblemDocument], "application/problem+json")
    return described


def _response(status: int, schema: Any, media_type: str = "application/json") -> dict[str, Any]:
    return {"description": HTTPStatus(status).phrase, "content": {media_type: {"schema": schema}}}
