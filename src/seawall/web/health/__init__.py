"""Health checks: which checks run, how often, and how probes are answered."""

from seawall.web.health.health import Degraded, Finding, Health, Healthy, Unhealthy

__all__ = ["Degraded", "Finding", "Health", "Healthy", "Unhealthy"]
