"""Codecs: chunks made smaller on their way to a tier, exactly or with a measured loss."""
