"""The client's edge: guarded calls to other services, by the libraries people use."""
