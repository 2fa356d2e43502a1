"""The exit codes of `dflow`: success, a failure, a mistake in usage or in a pipeline; Ctrl-C while nothing ran."""

OK, FAILED, USAGE = 0, 1, 2
INTERRUPTED = 130
