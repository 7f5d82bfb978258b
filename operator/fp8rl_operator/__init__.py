"""The operator of FP8RLJob. Reading order: `spec`, `plan`, `manifests`, `cluster`, `status`, `reconcile`."""
