"""Why a node runs, and what differs between runs."""
