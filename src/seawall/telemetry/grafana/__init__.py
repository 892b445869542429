"""A dashboard for Grafana, made from the table of metrics."""
