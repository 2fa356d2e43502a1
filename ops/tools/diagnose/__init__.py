"""`dflow diagnose`: the usual causes of a low tau."""
