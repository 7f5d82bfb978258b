"""`Cluster` over the API of Kubernetes, for any number of jobs: what the watches told in, server-side apply out."""
