"""Blending: documents' KV reused wherever they stand, for requests that ask for it."""

from kv_blend.plan import BlendPlan, edited, request_fields

__all__ = ["BlendPlan", "edited", "request_fields"]
