"""For all tests outside the engines' environments: Hypothesis on a machine that is shared and sometimes slow."""

from hypothesis import HealthCheck, settings

# How fast examples are made says nothing of our code.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
