"""Parts that the benchmarks of weights share. They run as scripts: `benchmarks/` is on their path."""
