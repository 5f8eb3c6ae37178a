"""The plan: bytes per phase, device and host, before the run. A pure function of config.json, recipe and capacities."""
