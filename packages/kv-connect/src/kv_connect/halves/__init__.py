"""The two halves of a connector: the scheduler half decides, the worker half copies."""
