"""Orders in which chunks leave a tier."""
