"""One module for each command of `dflow`: `add_arguments(parser)` and `main(options)`, which returns the exit code."""
