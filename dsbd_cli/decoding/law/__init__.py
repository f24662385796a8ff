"""numpy only: the target and draft distributions, their samples, the three verification rules, the dynamic width."""
