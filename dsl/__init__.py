"""What a pipeline is: ops, nodes, graphs and their keys. Knows no torch, no MLflow and no store."""
