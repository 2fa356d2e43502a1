"""The artifact store: committed artifacts, leases, locks and integrity."""
