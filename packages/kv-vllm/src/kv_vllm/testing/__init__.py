"""What tests, the demo and the benchmarks need of a real engine: tiny models, and a look inside a running one."""
