"""How a compiled graph is run: plan, store, stages, records, tracking, and the `dflow` command."""
