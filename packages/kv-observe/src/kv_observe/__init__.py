"""Subscribers of a cache's events: metrics, log, recorder, spans, history."""
