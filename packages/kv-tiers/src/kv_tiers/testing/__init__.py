"""What every cache and every policy must keep, as test classes to inherit, and a model that is always right."""
