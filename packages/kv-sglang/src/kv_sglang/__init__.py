"""The name of the SGLang package. It has no backend in this release."""
