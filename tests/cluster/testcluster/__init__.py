"""A Kubernetes cluster of real parts on this machine, for tests. Needs nothing but the standard library."""
