"""The other pods of a service: each publishes its view in the store, and reads the others."""
